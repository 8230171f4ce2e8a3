"""Bundles of this runtime: resolves references, fetches blobs into a local layout, verifies them.

Knows references, digests and files. Only `grpc_source` knows the wire; no module knows the use of a bundle.
"""
