"""Cuts a checkpoint into rank shards: decides which rank holds which part of each tensor, and writes the files.

`plan` states the parts as data and needs no torch; `parts` copies them; `writer` streams a shard. Must not know
executables, the bundle's store or the service.
"""
