"""The compiler service: makes bundles from checkpoints and configurations.

The service process validates, queues, answers and remembers; it never imports torch, so that no build can freeze or
kill it. Builds run in processes of their own (`builds`), where `pipeline` joins models, tracing, lowering, sharding and
publishing. Must not know how runtimes run bundles, except for `execution`'s executors, which verify them.
"""
