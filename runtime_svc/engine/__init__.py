"""The engine of one deployment: schedules requests on KV slots, drives the ranks step by step, fills the streams.

Knows tokens, slots, buckets and time. Must not know tensors, gRPC, protobuf, or what a model computes. Everything runs
on one event loop, and nothing here blocks it: compute happens in the ranks.
"""
