"""The bundles of the store: names and versions, imports from elsewhere, and the collection of garbage.

Must not know how bundles are built, nor protobuf.
"""
