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
    Rule(
        ("n_positions", "max_length", "seq_len"),
        lambda v: v["max_length"] < v["seq_len"] or v["n_positions"] <= v["max_length"],
        "at most max_length, which is {max_length}: every position has its place in the KV cache",
        KILN,
    ),
    Rule(
        ("n_active_tokens", "seq_len"),
        lambda v: v["n_active_tokens"] <= v["seq_len"],
        "at most seq_len, which is {seq_len}: the active tokens of a row are of one sequence",
        KILN,
    ),
)

LENGTH_NOTES: Final = (
    Note(
        lambda v: v["max_length"] > v["seq_len"],
        "neuron_config.max_length: KV positions beyond seq_len, which is {seq_len}, are never used",
    ),
    Note(
        lambda v: v["n_positions"] < v["seq_len"],
        "neuron_config.n_positions: sequences end at {n_positions} tokens, although seq_len is {seq_len}",
    ),
    Note(
        lambda v: v["n_active_tokens"] < min(v["max_context_length"], v["n_positions"]),
        "neuron_config.n_active_tokens: prompts are at most {n_active_tokens} tokens, although max_context_length is "
        "{max_context_length}",
    ),
)
