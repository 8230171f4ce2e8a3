"""Benchmarks: figures beside a peer or a limit measured in the same run. Never part of a test.

Knows everything; nothing knows it.
"""
