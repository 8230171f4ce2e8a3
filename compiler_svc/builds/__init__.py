"""Runs builds: traces, lowers, shards, checks against the reference, publishes.

`process` runs in the build process and calls `pipeline`, which runs the stages. `job`, `progress` and `debug_file` need
no torch; the service uses them, too. Must not know protobuf or the queue of compiles.
"""
