"""Manages the bundles of the store: names and versions, imports from elsewhere, and garbage collection.

Must not know how bundles are built, nor protobuf.
"""
