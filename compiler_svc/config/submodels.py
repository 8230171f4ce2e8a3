"""Which submodels a configuration compiles, and for which shapes."""

from __future__ import annotations

from dataclasses import dataclass

from bundle.abi.submodels import SUBMODELS, SubmodelName
from compiler_svc.config.buckets import pair_with_batches, pair_with_prefixes
from compiler_svc.config.tables.neuron_config import NeuronConfig


@dataclass(frozen=True)
class SubmodelShape:
    """One submodel and its static shapes.

    Attributes:
        batch_size: Rows of a step, in the largest shape if the buckets have batch sizes.
        buckets: One executable each, in the order that they are tried: (length,) in tokens; with prefix caching
            (tokens to compute, cached tokens), tokens to compute being 1 in decode; with batches of token generation
            (rows, length).
    """

    name: SubmodelName
    batch_size: int
    buckets: tuple[tuple[int, ...], ...]

    def count_graphs(self, *, skips_idle: bool) -> int:
        """Counts the buckets' different graphs; with `skips_idle` what they read of the cache does not matter."""
        if not skips_idle:
            return len(self.buckets)
        shapes = slice(1) if SUBMODELS[self.name].computes_prompts else slice(-1)
        return len({bucket[shapes] for bucket in self.buckets})


def count_row_tokens(config: NeuronConfig, submodel: SubmodelShape) -> int:
    """Counts the tokens of a row in a submodel's largest step."""
    row = SUBMODELS[submodel.name]
    if row.computes_prompts:
        # With prefix caching a bucket is (tokens to compute, cached tokens).
        return max(bucket[0] for bucket in submodel.buckets)
    return row.tokens if isinstance(row.tokens, int) else int(getattr(config, row.tokens))


def count_ring_step(config: NeuronConfig) -> int:
    """Counts the tokens of a row in the largest step, which rings have to hold; 0 if the KV cache is made of blocks."""
    if config.is_block_kv_layout:
        return 0
    return max(count_row_tokens(config, submodel) for submodel in describe_submodels(config))


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
    return _make_shape("context_encoding", config, buckets)


def _describe_generation(config: NeuronConfig) -> SubmodelShape:
    if config.is_medusa:
        return _make_shape("medusa_speculation", config, ((config.seq_len,),))
    lengths = config.token_generation_buckets
    buckets: tuple[tuple[int, ...], ...] = tuple((length,) for length in lengths)
    if config.is_prefix_caching:
        buckets = tuple((1, length) for length in lengths)
    if config.enable_fused_speculation:
        return _make_shape("fused_speculation", config, buckets)
    if config.speculation_length > 0:
        return _make_shape("speculation", config, buckets)
    if config.token_generation_batches:
        buckets = pair_with_batches(config.token_generation_batches, config.tkg_batch_size, lengths)
    return _make_shape("token_generation", config, buckets)


def _make_shape(name: SubmodelName, config: NeuronConfig, buckets: tuple[tuple[int, ...], ...]) -> SubmodelShape:
    return SubmodelShape(name, getattr(config, SUBMODELS[name].rows), buckets)
