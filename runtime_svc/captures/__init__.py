"""Captured inputs on disk: one safetensors file for each request that captures, written when the request has ended.

Knows files and streams. Must not know gRPC, protobuf, or how the engine makes steps.
"""
