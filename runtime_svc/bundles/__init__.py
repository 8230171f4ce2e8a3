"""Bundles on their way to the ranks: resolved, fetched into a local layout, verified.

Knows references, digests and files. Only `grpc_source` and `channel` know the wire; nothing here knows
what a bundle is used for.
"""
