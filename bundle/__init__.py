"""The bundle format: manifest, ABI, digests and the OCI layout store.

Knows files, digests and JSON. Must not know torch, grpc, protobuf or what a model computes.
"""
