"""Ranks: the processes that run executables, and the memory through which a service drives them.

`group` is what services use; `process` and `rank` run inside a rank. Must not know the wire.
"""
