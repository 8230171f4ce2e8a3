"""Compiles that the service accepted: queued, deduplicated, run as builds, and recorded as operations.

Needs no torch and knows no protobuf. A build runs in a process of its own; `build_runner` starts and follows it.
"""
