"""Cuts a checkpoint into rank shards: which rank holds which part of which tensor, and the files that hold them.

`plan` states it as data and needs no torch; `parts` copies parts of tensors; `writer` streams a shard. Must not know
executables, the bundle's store or the service.
"""
