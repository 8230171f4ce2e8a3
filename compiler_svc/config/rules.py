"""What attributes demand of each other, and what their combination lets a caller expect.

A rule names the attributes that it reads, so that it is left out where one of them is a mistake already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Resolved values of one table, by attribute name.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """One demand. The first attribute read is the one that a violation names.

    Attributes:
        reads: Attributes that the rule reads.
        holds: Whether the values keep it.
        accepted: What would be accepted, with attribute names in braces for their values.
    """

    reads: tuple[str, ...]
    holds: Callable[[Values], bool]
    accepted: str


@dataclass(frozen=True)
class Note:
    """One remark on values that are in order but may not do what their author expects."""

    applies: Callable[[Values], bool]
    text: str


def _last_at_most(buckets: str, limit: str) -> Callable[[Values], bool]:
    return lambda values: not values[buckets] or values[buckets][-1] <= values[limit]


NEURON_CONFIG_RULES: Final = (
    Rule(
        ("max_context_length", "seq_len"),
        lambda v: v["max_context_length"] <= v["seq_len"],
        "at most seq_len, which is {seq_len}: a sequence begins with its prompt",
    ),
    Rule(
        ("max_length", "seq_len"),
        lambda v: v["max_length"] >= v["seq_len"],
        "at least seq_len, which is {seq_len}: the KV cache holds whole sequences",
    ),
    Rule(
        ("max_new_tokens", "seq_len", "max_context_length"),
        lambda v: v["max_new_tokens"] is None or v["max_new_tokens"] <= v["seq_len"],
        "at most seq_len, which is {seq_len}",
    ),
    Rule(
        ("context_encoding_buckets", "max_context_length", "seq_len"),
        _last_at_most("context_encoding_buckets", "max_context_length"),
        "a list whose last bucket is at most max_context_length, which is {max_context_length}",
    ),
    Rule(
        ("token_generation_buckets", "max_length", "seq_len"),
        _last_at_most("token_generation_buckets", "max_length"),
        "a list whose last bucket is at most max_length, which is {max_length}",
    ),
    Rule(
        ("ctx_batch_size", "max_batch_size", "batch_size"),
        lambda v: v["ctx_batch_size"] <= v["max_batch_size"],
        "at most max_batch_size, which is {max_batch_size}: every row of a prefill writes a KV slot of its own",
    ),
    Rule(
        ("tkg_batch_size", "max_batch_size", "batch_size"),
        lambda v: v["tkg_batch_size"] == v["max_batch_size"],
        "max_batch_size, which is {max_batch_size}: row r of a decode step reads KV slot r, so that there are as many "
        "rows as slots; set both, or batch_size for all",
    ),
)

ON_DEVICE_SAMPLING_RULES: Final = (
    Rule(
        ("top_k", "global_topk"),
        lambda v: v["global_topk"] == 0 or v["top_k"] <= v["global_topk"],
        "at most global_topk, which is {global_topk}",
    ),
)

NEURON_CONFIG_NOTES: Final = (
    Note(
        lambda v: not v["enable_bucketing"] and bool(v["context_encoding_buckets"] or v["token_generation_buckets"]),
        "neuron_config: bucket lists are ignored because enable_bucketing is false",
    ),
    Note(
        lambda v: v["enable_bucketing"] and 0 < _last(v["context_encoding_buckets"]) < v["max_context_length"],
        "neuron_config.context_encoding_buckets: prompts longer than the last bucket are refused, although "
        "max_context_length is {max_context_length}",
    ),
    Note(
        lambda v: v["enable_bucketing"] and 0 < _last(v["token_generation_buckets"]) < v["seq_len"],
        "neuron_config.token_generation_buckets: sequences end at the last bucket, although seq_len is {seq_len}",
    ),
    Note(
        lambda v: v["max_length"] > v["seq_len"],
        "neuron_config.max_length: KV positions beyond seq_len, which is {seq_len}, are never used",
    ),
    Note(
        lambda v: not v["is_continuous_batching"] and v["max_batch_size"] > 1,
        "neuron_config.is_continuous_batching: the runtime lets requests join and leave the running batch all the same",
    ),
    Note(
        lambda v: v["rpl_reduce_dtype"] is not None and v["tp_degree"] == 1,
        "neuron_config.rpl_reduce_dtype: '{rpl_reduce_dtype}' is ignored: one rank reduces nothing",
    ),
    Note(
        lambda v: v["output_logits"] and v["on_device_sampling_config"] is None,
        "neuron_config.output_logits: logits are the output anyway because on_device_sampling_config is unset",
    ),
)

ON_DEVICE_SAMPLING_NOTES: Final = (
    Note(
        lambda v: not v["do_sample"] and not v["dynamic"] and (v["top_k"], v["top_p"], v["temperature"]) != (1, 1, 1),
        "neuron_config.on_device_sampling_config: top_k, top_p and temperature are ignored because neither do_sample "
        "nor dynamic is true: every token is the most likely one",
    ),
)


def broken_rules(rules: tuple[Rule, ...], values: Values, mistaken: set[str]) -> Iterator[tuple[str, str]]:
    """Yields (attribute, what would be accepted) for every broken rule that reads no mistaken attribute."""
    for rule in rules:
        if mistaken.isdisjoint(rule.reads) and not rule.holds(values):
            yield rule.reads[0], rule.accepted.format(**values)


def notes_on(notes: tuple[Note, ...], values: Values) -> Iterator[str]:
    """Yields the remarks on values that keep every rule."""
    for note in notes:
        if note.applies(values):
            yield note.text.format(**values)


def _last(buckets: tuple[int, ...]) -> int:
    return buckets[-1] if buckets else 0
