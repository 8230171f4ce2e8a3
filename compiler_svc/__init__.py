"""The compiler service: checkpoint and configuration in, bundle out.

The service process validates, queues, answers and remembers; it never imports torch, so that a build cannot freeze or
kill it. Builds run in processes of their own (`builds`), where `pipeline` joins models, tracing, lowering,
sharding and publishing. Must not know how bundles are run, beyond `execution`'s executors that verify them.
"""
