"""What is loaded: deployments, their cores, their weights.

Knows bundles, the engine and text. Must not know gRPC.
"""
