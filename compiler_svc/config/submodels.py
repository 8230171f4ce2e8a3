"""Which submodels a configuration compiles, and for which shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compiler_svc.config.buckets import pair_with_batches, pair_with_prefixes
from compiler_svc.config.tables.neuron_config import NeuronConfig

#: Submodels that some configuration compiles.
SubmodelName = Literal["context_encoding", "token_generation", "speculation", "fused_speculation", "medusa_speculation"]


@dataclass(frozen=True)
class SubmodelShape:
    """One submodel and its static shapes.

    Attributes:
        batch_size: Rows of a step; of the largest shape, if the buckets have batch sizes.
        buckets: One executable each, in the order that they are tried: (length,) in tokens; with prefix caching
            (tokens to compute, cached tokens), tokens to compute being 1 in decode; with batches of token generation
            (rows, length).
    """

    name: SubmodelName
    batch_size: int
    buckets: tuple[tuple[int, ...], ...]


def describe_submodels(config: NeuronConfig) -> tuple[SubmodelShape, ...]:
    """The submodels of a configuration, as NxD Inference has them: one that prefills, and one that generates.

    What generates is token generation without speculation. A draft model outside of the executable leaves speculation
    to verify its tokens; fused speculation holds both models; Medusa verifies its heads' tree, in one bucket.
    """
    return (_describe_prefill(config), _describe_generation(config))


def _describe_prefill(config: NeuronConfig) -> SubmodelShape:
    lengths = config.context_encoding_buckets
    buckets: tuple[tuple[int, ...], ...] = tuple((length,) for length in lengths)
    if config.is_prefix_caching:
        buckets = pair_with_prefixes(lengths, config.prefix_buckets)
    return SubmodelShape("context_encoding", config.ctx_batch_size, buckets)


def _describe_generation(config: NeuronConfig) -> SubmodelShape:
    if config.is_medusa:
        return SubmodelShape("medusa_speculation", config.spec_batch_size, ((config.seq_len,),))
    lengths = config.token_generation_buckets
    buckets: tuple[tuple[int, ...], ...] = tuple((length,) for length in lengths)
    if config.is_prefix_caching:
        buckets = tuple((1, length) for length in lengths)
    if config.enable_fused_speculation:
        return SubmodelShape("fused_speculation", config.tkg_batch_size, buckets)
    if config.speculation_length > 0:
        return SubmodelShape("speculation", config.spec_batch_size, buckets)
    if config.token_generation_batches:
        buckets = pair_with_batches(config.token_generation_batches, config.tkg_batch_size, lengths)
    return SubmodelShape("token_generation", config.tkg_batch_size, buckets)
