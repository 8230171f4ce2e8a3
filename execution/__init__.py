"""Runs executables: executors, the rank processes that hold them, and the link that drives a rank over shared memory.

Knows manifests, tensors and processes. Must not know requests, text, scheduling, gRPC or what a model computes.

Two sides. `step`, `step_memory`, `control`, `rank_handle`, `rank_group`, `isa` and `errors` are the parent's: they
import neither torch nor numpy, so that a service's event loop stays light. Everything else runs in a rank process, or
in a compiler that verifies what it has built.
"""
