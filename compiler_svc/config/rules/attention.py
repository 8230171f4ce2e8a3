"""Rules on attention and on splitting sequences over ranks."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.buckets import BUCKET_ATTRIBUTES, resolve_buckets
from compiler_svc.config.rules.rule import NXDI_CODE, Rule
from compiler_svc.config.tables.documents import ATTENTION


def _are_prompts_divisible(values: Values) -> bool:
    lengths = resolve_buckets(values)["context_encoding_buckets"]
    return all(length % values["tp_degree"] == 0 for length in lengths)


ATTENTION_RULES: Final = (
    Rule(
        ("attention_dtype", "torch_dtype", "cast_type"),
        lambda v: v["attention_dtype"] in (None, v["torch_dtype"]) or v["cast_type"] == "as-declared",
        "torch_dtype, which is {torch_dtype}; another dtype needs cast_type 'as-declared'",
        NXDI_CODE,
    ),
    Rule(
        ("sequence_parallel_enabled", "tp_degree", *BUCKET_ATTRIBUTES),
        lambda v: not v["sequence_parallel_enabled"] or _are_prompts_divisible(v),
        "false, unless max_context_length, which is {max_context_length}, and every context encoding bucket are "
        "divisible by tp_degree, which is {tp_degree}",
        ATTENTION,
    ),
)
