"""Runs executables: executors, the rank processes that hold them, and the link by which a parent drives a rank.

Knows manifests, tensors and processes. Must not know requests, text, scheduling, gRPC or what a model computes.

`step`, `isa`, `errors`, and `control`, `group`, `handle` and `step_memory` in `ranks` run in the parent: they import
neither torch nor numpy, so that a service's event loop stays light. Everything else runs in a rank process, or in a
compiler that verifies its executables.
"""
