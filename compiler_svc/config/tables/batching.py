"""NeuronConfig: buckets and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compiler_svc.config.attribute import Derivation, attribute, hint, same_as
from compiler_svc.config.domains import AscendingLengths, Integer
from compiler_svc.config.tables.documents import BUCKETING, CONTINUOUS_BATCHING, PREFIX_CACHING, UNDOCUMENTED
from compiler_svc.config.tables.general import NO_SIZE

_ALWAYS_CONTINUOUS: Final = hint("requests join and leave the running batch in any case", acts_as=True)


def _generated(words: str) -> Derivation:
    """The default of a list that is generated from the resolved values, if it is at all; until then it is empty."""
    return Derivation(lambda _: (), words)


@dataclass(frozen=True, kw_only=True)
class BatchingAttributes:
    """Static shapes: buckets in tokens, and batch sizes in rows."""

    enable_bucketing: bool = attribute(BUCKETING, default=False)
    context_encoding_buckets: tuple[int, ...] = attribute(
        BUCKETING,
        AscendingLengths(),
        default=_generated(
            "powers of two from 128 to the least of max_context_length, n_active_tokens and n_positions; without "
            "enable_bucketing that alone"
        ),
    )
    token_generation_buckets: tuple[int, ...] = attribute(
        BUCKETING,
        AscendingLengths(),
        default=_generated(
            "powers of two from 128 to max_length, or n_positions if that is less than seq_len; without "
            "enable_bucketing that alone"
        ),
    )
    prefix_buckets: tuple[int, ...] = attribute(
        PREFIX_CACHING,
        AscendingLengths(),
        default=_generated("with is_prefix_caching, powers of two from 512 to the longest prompt"),
    )
    token_generation_batches: tuple[int, ...] = attribute(
        UNDOCUMENTED, AscendingLengths(), default=_generated("tkg_batch_size alone")
    )
    is_continuous_batching: bool = attribute(
        CONTINUOUS_BATCHING, default=False, cpu=_ALWAYS_CONTINUOUS, neuron=NO_SIZE, compiled=_ALWAYS_CONTINUOUS
    )
    ctx_batch_size: int = attribute(CONTINUOUS_BATCHING, Integer(1), default=same_as("batch_size"))
    tkg_batch_size: int = attribute(CONTINUOUS_BATCHING, Integer(1), default=same_as("batch_size"))
    # The documents set tkg_batch_size alone to the largest batch.
    max_batch_size: int = attribute(
        CONTINUOUS_BATCHING,
        Integer(1),
        default=Derivation(
            lambda values: max(values["batch_size"], values["tkg_batch_size"]),
            "the larger one of batch_size and tkg_batch_size",
        ),
    )
