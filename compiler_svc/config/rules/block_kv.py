"""Rules on blocks of KV, on prefix caching and on prompts in chunks."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.buckets import BUCKET_ATTRIBUTES, resolve_buckets
from compiler_svc.config.rules.rule import KILN, Note, Rule
from compiler_svc.config.tables.documents import PREFIX_CACHING
from targets.cpu import CPU


def _has_blocks_for(values: Values, num_sequences: int) -> bool:
    return bool(values["pa_num_blocks"] * values["pa_block_size"] >= num_sequences * values["max_length"])


#: Positions that int32 can number.
_MAX_PLACES: Final = 1 << 31
_SIZES: Final = (
    "pa_num_blocks",
    "pa_block_size",
    "is_block_kv_layout",
    "batch_size",
    "max_batch_size",
    "max_length",
    "seq_len",
)


def _have_whole_blocks(values: Values) -> bool:
    """Whether all lengths that are read from blocks are lengths of whole blocks."""
    lists = resolve_buckets(values)
    lengths = (*lists["prefix_buckets"], *lists["token_generation_buckets"])
    return all(length % values["pa_block_size"] == 0 for length in lengths)


BLOCK_KV_RULES: Final = (
    Rule(
        ("is_prefix_caching", "is_block_kv_layout"),
        lambda v: not v["is_prefix_caching"] or v["is_block_kv_layout"],
        "false, unless is_block_kv_layout is true",
        PREFIX_CACHING,
    ),
    Rule(
        _SIZES,
        lambda v: not v["is_block_kv_layout"] or v["target"] == CPU.kind or _has_blocks_for(v, v["max_batch_size"]),
        "at least max_batch_size * max_length / pa_block_size = {max_batch_size} * {max_length} / {pa_block_size}: "
        "every row can hold a whole sequence",
        PREFIX_CACHING,
    ),
    Rule(
        _SIZES,
        lambda v: not v["is_block_kv_layout"] or v["target"] != CPU.kind or _has_blocks_for(v, 1),
        "at least max_length / pa_block_size = {max_length} / {pa_block_size}: the longest sequence fits",
        KILN,
    ),
    Rule(
        ("pa_num_blocks", "pa_block_size", "is_block_kv_layout", "batch_size", "seq_len"),
        lambda v: not v["is_block_kv_layout"] or (v["pa_num_blocks"] + 1) * v["pa_block_size"] <= _MAX_PLACES,
        f"less than {_MAX_PLACES} / pa_block_size, which is {{pa_block_size}}: executables number the positions of all "
        "blocks, and those of a scratch block, in int32",
        KILN,
    ),
    Rule(
        ("is_block_kv_layout", "padding_side"),
        lambda v: not v["is_block_kv_layout"] or v["target"] != CPU.kind or v["padding_side"] == "right",
        "false beside padding_side left: sequences that lose their blocks are computed again in chunks, which are "
        "padded on the right",
        KILN,
    ),
    Rule(
        ("is_prefix_caching", "padding_side"),
        lambda v: not v["is_prefix_caching"] or v["target"] != CPU.kind or v["padding_side"] == "right",
        "false beside padding_side left: what lies behind a cached prefix is padded on the right",
        KILN,
    ),
    Rule(
        ("is_chunked_prefill", "padding_side"),
        lambda v: not v["is_chunked_prefill"] or v["target"] != CPU.kind or v["padding_side"] == "right",
        "false beside padding_side left: a chunk behind the first one is padded on the right",
        KILN,
    ),
    Rule(
        ("pa_block_size", "is_block_kv_layout", *BUCKET_ATTRIBUTES),
        lambda v: not v["is_block_kv_layout"] or _have_whole_blocks(v),
        "a divisor of all token_generation_buckets and prefix_buckets, which end with {max_length} and "
        "{max_context_length} unless they are listed",
        PREFIX_CACHING,
    ),
)

BLOCK_KV_NOTES: Final = (
    Note(
        lambda v: (
            not v["is_block_kv_layout"] and (v["pa_num_blocks"], v["pa_block_size"]) != (v["batch_size"], v["seq_len"])
        ),
        "neuron_config: pa_num_blocks and pa_block_size are ignored because is_block_kv_layout is false",
    ),
)
