"""Rules on lengths: prompt, sequence and KV cache, in tokens."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.rules.rule import KILN, Note, Rule
from compiler_svc.config.tables.documents import GENERAL

# That a prompt fits max_length follows from the first two.
LENGTH_RULES: Final = (
    Rule(
        ("max_context_length", "seq_len"),
        lambda v: v["max_context_length"] <= v["seq_len"],
        "at most seq_len, which is {seq_len}: a sequence begins with its prompt",
        GENERAL,
    ),
    Rule(
        ("max_length", "seq_len"),
        lambda v: v["max_length"] >= v["seq_len"],
        "at least seq_len, which is {seq_len}: the KV cache holds whole sequences",
        KILN,
    ),
    Rule(
        ("max_new_tokens", "seq_len", "max_context_length"),
        lambda v: v["max_new_tokens"] is None or v["max_new_tokens"] <= v["seq_len"],
        "at most seq_len, which is {seq_len}",
        GENERAL,
    ),
)

LENGTH_NOTES: Final = (
    Note(
        lambda v: v["max_length"] > v["seq_len"],
        "neuron_config.max_length: KV positions beyond seq_len, which is {seq_len}, are never used",
    ),
)
