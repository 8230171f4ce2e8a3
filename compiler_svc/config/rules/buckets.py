"""Rules on lists of buckets. That they ascend is in their domain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.rules.rule import KILN, NXDI_CODE, Note, Rule
from compiler_svc.config.tables.documents import BUCKETING, PREFIX_CACHING
from targets.registry import TARGETS

_LISTS: Final = ("context_encoding_buckets", "token_generation_buckets", "prefix_buckets")


def _last_at_most(buckets: str, limit: str) -> Callable[[Values], bool]:
    return lambda values: not values[buckets] or values[buckets][-1] <= values[limit]


def _last(buckets: tuple[int, ...]) -> int:
    return buckets[-1] if buckets else 0


def _has_prompts_beyond_buckets(values: Values) -> bool:
    return bool(
        values["enable_bucketing"] and 0 < _last(values["context_encoding_buckets"]) < values["max_context_length"]
    )


def _batches_without(attribute: str, is_off: Callable[[Values], bool]) -> Rule:
    return Rule(
        ("token_generation_batches", attribute),
        lambda v: not v["token_generation_batches"] or is_off(v),
        f"none, because {attribute} is {{{attribute}}}: batches of token generation go with neither speculation nor "
        "blocks of KV",
        NXDI_CODE,
    )


# That batches go with neither fused speculation nor prefix caching follows: those need speculation and blocks.
BUCKET_RULES: Final = (
    Rule(
        ("context_encoding_buckets", "max_context_length", "seq_len"),
        _last_at_most("context_encoding_buckets", "max_context_length"),
        "a list whose last bucket is at most max_context_length, which is {max_context_length}",
        BUCKETING,
    ),
    Rule(
        ("token_generation_buckets", "max_length", "seq_len"),
        _last_at_most("token_generation_buckets", "max_length"),
        "a list whose last bucket is at most max_length, which is {max_length}",
        BUCKETING,
    ),
    Rule(
        ("context_encoding_buckets", "n_active_tokens", "max_context_length", "seq_len"),
        lambda v: (
            v["n_active_tokens"] >= v["max_context_length"]
            or _last(v["context_encoding_buckets"]) <= v["n_active_tokens"]
        ),
        "a list whose last bucket is at most n_active_tokens, which is {n_active_tokens}",
        KILN,
    ),
    Rule(
        ("token_generation_buckets", "n_positions", "seq_len"),
        lambda v: v["n_positions"] >= v["seq_len"] or _last(v["token_generation_buckets"]) <= v["n_positions"],
        "a list whose last bucket is at most n_positions, which is {n_positions}",
        KILN,
    ),
    Rule(
        ("prefix_buckets", "max_context_length", "seq_len"),
        _last_at_most("prefix_buckets", "max_context_length"),
        "a list whose last bucket is at most max_context_length, which is {max_context_length}",
        PREFIX_CACHING,
    ),
    Rule(
        ("token_generation_batches", "tkg_batch_size", "batch_size"),
        _last_at_most("token_generation_batches", "tkg_batch_size"),
        "a list whose last batch size is at most tkg_batch_size, which is {tkg_batch_size}",
        NXDI_CODE,
    ),
    _batches_without("speculation_length", lambda v: v["speculation_length"] == 0),
    _batches_without("is_medusa", lambda v: not v["is_medusa"]),
    _batches_without("is_block_kv_layout", lambda v: not v["is_block_kv_layout"]),
)

BUCKET_NOTES: Final = (
    Note(
        lambda v: not v["enable_bucketing"] and any(v[name] for name in _LISTS),
        "neuron_config: bucket lists are ignored because enable_bucketing is false",
    ),
    Note(
        lambda v: _has_prompts_beyond_buckets(v) and not TARGETS[v["target"]].computes_chunks("right"),
        "neuron_config.context_encoding_buckets: prompts longer than the last bucket are refused, although "
        "max_context_length is {max_context_length}",
    ),
    Note(
        lambda v: (
            _has_prompts_beyond_buckets(v)
            and TARGETS[v["target"]].computes_chunks("right")
            and not TARGETS[v["target"]].computes_chunks(v["padding_side"])
        ),
        "neuron_config.padding_side: prompts longer than the last of context_encoding_buckets are refused, although "
        "max_context_length is {max_context_length}: their chunks would have to be padded on the right",
    ),
    Note(
        lambda v: v["enable_bucketing"] and 0 < _last(v["token_generation_buckets"]) < v["seq_len"],
        "neuron_config.token_generation_buckets: sequences end at the last bucket, although seq_len is {seq_len}",
    ),
    Note(
        lambda v: v["enable_bucketing"] and bool(v["prefix_buckets"]) and not v["is_prefix_caching"],
        "neuron_config.prefix_buckets: they are ignored because is_prefix_caching is false",
    ),
)
