"""Captured inputs on disk: one safetensors file for each request that asks, written when the request has ended.

Knows files and streams. Must not know gRPC, protobuf, or how steps are made.
"""
