"""Bundles on their way to the ranks: resolved, fetched into a local layout, verified.

Knows references, digests and files. Only `grpc_source` knows the wire; nothing here knows what a bundle is used for.
"""
