"""The engine of one deployment: schedules requests on the KV cache, drives the ranks step by step, fills the streams.

Knows tokens, places in the KV cache, buckets and time. Must not know tensors, gRPC, protobuf, or model code.
Everything runs on one event loop, and nothing here blocks it: compute happens in the ranks.
"""
