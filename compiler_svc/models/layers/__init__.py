"""Rank-local layers, built from the records of `models.description`.

Parameters are uninitialized: values come from a weight shard. A parameter may have another dtype than the activations
(`cast_type` as-declared); it is cast when it is used. Nothing is constructed on the CPU inside a graph, and indices are
int32, so that XLA traces every layer.
"""
