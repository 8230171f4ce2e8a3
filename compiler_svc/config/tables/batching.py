"""NeuronConfig: buckets and batches."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import LATER, Attribute, hint, same_as
from compiler_svc.config.domains import AscendingLengths, Flag, Integer
from compiler_svc.config.tables.documents import BUCKETING, CONTINUOUS_BATCHING, PREFIX_CACHING, UNDOCUMENTED

_ALWAYS_CONTINUOUS: Final = hint("requests join and leave the running batch in any case", acts_as=True)


def _rows(name: str) -> Attribute:
    return Attribute(
        name=name,
        domain=Integer(1),
        default=same_as("batch_size"),
        derivation="batch_size",
        section=CONTINUOUS_BATCHING,
    )


BATCHING_ATTRIBUTES: Final = (
    Attribute(name="enable_bucketing", domain=Flag(), default=False, section=BUCKETING),
    Attribute(
        name="context_encoding_buckets",
        domain=AscendingLengths(),
        default=(),
        derivation="powers of two from 128 to max_context_length; without enable_bucketing max_context_length alone",
        section=BUCKETING,
    ),
    Attribute(
        name="token_generation_buckets",
        domain=AscendingLengths(),
        default=(),
        derivation="powers of two from 128 to max_length; without enable_bucketing max_length alone",
        section=BUCKETING,
    ),
    Attribute(
        name="prefix_buckets",
        domain=AscendingLengths(),
        default=(),
        derivation="with is_prefix_caching, powers of two from 512 to max_context_length",
        section=PREFIX_CACHING,
        cpu=LATER,
    ),
    Attribute(
        name="token_generation_batches",
        domain=AscendingLengths(),
        default=(),
        derivation="tkg_batch_size alone",
        section=UNDOCUMENTED,
        cpu=LATER,
    ),
    Attribute(
        name="is_continuous_batching",
        domain=Flag(),
        default=False,
        section=CONTINUOUS_BATCHING,
        cpu=_ALWAYS_CONTINUOUS,
    ),
    _rows("max_batch_size"),
    _rows("ctx_batch_size"),
    _rows("tkg_batch_size"),
)
