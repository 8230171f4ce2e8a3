"""The runtime service: loads bundles onto cores and turns requests into token streams.

Knows gRPC at its rim, text, scheduling and KV slots. It takes every fact about a model from the bundle's manifest. Must
not know torch, model code or the compiler service; executables run in rank processes.
"""
