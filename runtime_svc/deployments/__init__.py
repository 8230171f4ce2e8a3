"""Deployments: loading and unloading them, their cores, their memory, their weights.

Knows bundles, the engine and text. Must not know gRPC.
"""
