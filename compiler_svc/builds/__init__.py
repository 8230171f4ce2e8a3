"""What a build process does: traces, lowers, shards, checks against the reference, publishes.

`process` runs in the build process and calls `pipeline`, which runs the stages. `job`, `progress` and `debug_file` need
no torch and serve the service, too. Must not know protobuf or the queue of compiles.
"""
