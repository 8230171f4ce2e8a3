"""Rules on batch sizes: rows of a step, and slots of the KV cache."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.rules.rule import Note, Rule
from compiler_svc.config.tables.documents import CONTINUOUS_BATCHING

BATCHING_RULES: Final = (
    Rule(
        ("ctx_batch_size", "max_batch_size", "batch_size"),
        lambda v: v["ctx_batch_size"] <= v["max_batch_size"],
        "at most max_batch_size, which is {max_batch_size}: every row of a prefill writes a KV slot of its own",
        CONTINUOUS_BATCHING,
    ),
    Rule(
        ("tkg_batch_size", "max_batch_size", "batch_size"),
        lambda v: v["tkg_batch_size"] <= v["max_batch_size"],
        "at most max_batch_size, which is {max_batch_size}: every row of a decode step reads a KV slot of its own",
        CONTINUOUS_BATCHING,
    ),
)

BATCHING_NOTES: Final = (
    Note(
        lambda v: not v["is_continuous_batching"] and v["max_batch_size"] > 1,
        "neuron_config.is_continuous_batching: the runtime lets requests join and leave the running batch all the same",
    ),
    Note(
        lambda v: v["rpl_reduce_dtype"] is not None and v["tp_degree"] == 1,
        "neuron_config.rpl_reduce_dtype: '{rpl_reduce_dtype}' is ignored: one rank reduces nothing",
    ),
    Note(
        lambda v: v["vocab_parallel"] and v["tp_degree"] == 1,
        "neuron_config.vocab_parallel: ignored: one rank has the whole vocabulary",
    ),
)
