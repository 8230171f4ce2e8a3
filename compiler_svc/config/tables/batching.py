"""NeuronConfig: buckets and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.config.attribute import Derivation, Values, attribute, hint, same_as
from compiler_svc.config.domains import ASCENDING_LENGTHS, integer
from compiler_svc.config.rule import KILN, NXDI_CODE, Note, Rule, at_most
from compiler_svc.config.tables.documents import BUCKETING, CONTINUOUS_BATCHING, PREFIX_CACHING, UNDOCUMENTED
from compiler_svc.config.tables.general import NO_SIZE
from compiler_svc.config.tables.speculation import TREE
from targets.cpu import CPU
from targets.registry import TARGETS

_ALWAYS_CONTINUOUS: Final = hint("requests join and leave the running batch in any case", acts_as=True)
_GENERATED: Final = (
    "as NxD Inference generates them: the last power of two is left out if the longest length is nearer to it; a "
    "user's list must ascend, which NxD Inference sorts"
)


def _generated(words: str) -> Derivation:
    """The default of a list that is generated from the resolved values, if it is at all; until then it is empty."""
    return Derivation(lambda _: (), words)


@dataclass(frozen=True, kw_only=True)
class BatchingAttributes:
    """Static shapes: buckets in tokens, and batch sizes in rows."""

    enable_bucketing: bool = attribute(BUCKETING, default=False)
    context_encoding_buckets: tuple[int, ...] = attribute(
        BUCKETING,
        ASCENDING_LENGTHS,
        default=_generated(
            "powers of two from 128 to the least of max_context_length, n_active_tokens and n_positions; without "
            "enable_bucketing that alone"
        ),
        note=f"{_GENERATED}; the smallest bucket that fits a prompt is taken, equal length included",
    )
    token_generation_buckets: tuple[int, ...] = attribute(
        BUCKETING,
        ASCENDING_LENGTHS,
        default=_generated(
            "powers of two from 128 to max_length, or n_positions if that is less than seq_len; without "
            "enable_bucketing that alone"
        ),
        note=_GENERATED,
    )
    prefix_buckets: tuple[int, ...] = attribute(
        PREFIX_CACHING,
        ASCENDING_LENGTHS,
        default=_generated("with is_prefix_caching, powers of two from 512 to the longest prompt"),
        note="NxD Inference neither sorts nor checks a list, and fails beside context_encoding_buckets without one",
    )
    token_generation_batches: tuple[int, ...] = attribute(
        UNDOCUMENTED, ASCENDING_LENGTHS, default=_generated("tkg_batch_size alone")
    )
    is_continuous_batching: bool = attribute(
        CONTINUOUS_BATCHING,
        default=False,
        cpu=_ALWAYS_CONTINUOUS,
        neuron=NO_SIZE,
        compiled=_ALWAYS_CONTINUOUS,
        note="without it, NxD Inference's batches come in full",
    )
    ctx_batch_size: int = attribute(CONTINUOUS_BATCHING, integer(1), default=same_as("batch_size"))
    tkg_batch_size: int = attribute(CONTINUOUS_BATCHING, integer(1), default=same_as("batch_size"))
    # The documents set tkg_batch_size alone to the largest batch.
    max_batch_size: int = attribute(
        CONTINUOUS_BATCHING,
        integer(1),
        default=Derivation(
            lambda values: max(values["batch_size"], values["tkg_batch_size"]),
            "the larger one of batch_size and tkg_batch_size",
        ),
        note="batch_size by default in NxD Inference, also if tkg_batch_size is larger; the KV cache has so many rows "
        "and one more, into which idle rows write",
    )


BATCHING_RULES: Final = (
    at_most(
        "ctx_batch_size",
        "max_batch_size",
        "batch_size",
        section=CONTINUOUS_BATCHING,
        because="every row of a prefill writes a KV slot of its own",
    ),
    at_most(
        "tkg_batch_size",
        "max_batch_size",
        "batch_size",
        section=CONTINUOUS_BATCHING,
        because="every row of a decode step reads a KV slot of its own",
    ),
)

BATCHING_NOTES: Final = (
    Note(
        lambda v: not v["is_continuous_batching"] and v["max_batch_size"] > 1,
        "neuron_config.is_continuous_batching: the runtime lets requests join and leave the running batch all the same",
        doubtful={"batch_size": 2},
        plain={"batch_size": 2, "is_continuous_batching": True},
    ),
    Note(
        lambda v: v["rpl_reduce_dtype"] is not None and v["tp_degree"] == 1,
        "neuron_config.rpl_reduce_dtype: '{rpl_reduce_dtype}' is ignored: one rank reduces nothing",
        doubtful={"rpl_reduce_dtype": "float32"},
        plain={"rpl_reduce_dtype": "float32", "tp_degree": 2},
        target=CPU.kind,
    ),
    Note(
        lambda v: v["vocab_parallel"] and v["tp_degree"] == 1,
        "neuron_config.vocab_parallel: ignored: one rank has the whole vocabulary",
        doubtful={"vocab_parallel": True},
        plain={"vocab_parallel": True, "tp_degree": 2},
    ),
)


_LISTS: Final = ("context_encoding_buckets", "token_generation_buckets", "prefix_buckets")


def _ends_within(listed: str, limit: str, base: str, *, section: str, of: str = "bucket") -> Rule:
    """A list ends at most at `limit`, which follows from `base`."""
    beside = {base: 128, limit: 128, "enable_bucketing": True}
    return Rule(
        (listed, limit, base),
        lambda v: _last(v[listed]) <= v[limit],
        f"a list whose last {of} is at most {limit}, which is {{{limit}}}",
        section,
        breaks={**beside, listed: (64, 256)},
        keeps={**beside, listed: (64, 128)},
    )


_BUCKETS: Final = {"seq_len": 256, "enable_bucketing": True}


def _last(buckets: tuple[int, ...]) -> int:
    return buckets[-1] if buckets else 0


def _has_prompts_beyond_buckets(values: Values) -> bool:
    return bool(
        values["enable_bucketing"] and 0 < _last(values["context_encoding_buckets"]) < values["max_context_length"]
    )


def _batches_without(attribute: str, is_off: Callable[[Values], bool], **on: Any) -> Rule:
    return Rule(
        ("token_generation_batches", attribute),
        lambda v: not v["token_generation_batches"] or is_off(v),
        f"none, because {attribute} is {{{attribute}}}: batches of token generation go with neither speculation nor "
        "blocks of KV",
        NXDI_CODE,
        breaks={"token_generation_batches": [1], **on},
        keeps={"token_generation_batches": [1]},
    )


# That batches go with neither fused speculation nor prefix caching follows: those need speculation and blocks.
BUCKET_RULES: Final = (
    _ends_within("context_encoding_buckets", "max_context_length", "seq_len", section=BUCKETING),
    _ends_within("token_generation_buckets", "max_length", "seq_len", section=BUCKETING),
    Rule(
        ("context_encoding_buckets", "n_active_tokens", "max_context_length", "seq_len"),
        lambda v: (
            v["n_active_tokens"] >= v["max_context_length"]
            or _last(v["context_encoding_buckets"]) <= v["n_active_tokens"]
        ),
        "a list whose last bucket is at most n_active_tokens, which is {n_active_tokens}",
        KILN,
        breaks=_BUCKETS | {"n_active_tokens": 64, "context_encoding_buckets": [64, 65]},
        keeps=_BUCKETS | {"n_active_tokens": 64, "context_encoding_buckets": [32, 64]},
    ),
    Rule(
        ("token_generation_buckets", "n_positions", "seq_len"),
        lambda v: v["n_positions"] >= v["seq_len"] or _last(v["token_generation_buckets"]) <= v["n_positions"],
        "a list whose last bucket is at most n_positions, which is {n_positions}",
        KILN,
        breaks=_BUCKETS | {"n_positions": 128, "token_generation_buckets": [64, 256]},
        keeps=_BUCKETS | {"n_positions": 128, "token_generation_buckets": [64, 128]},
    ),
    _ends_within("prefix_buckets", "max_context_length", "seq_len", section=PREFIX_CACHING),
    _ends_within("token_generation_batches", "tkg_batch_size", "batch_size", section=NXDI_CODE, of="batch size"),
    _batches_without("speculation_length", lambda v: v["speculation_length"] == 0, speculation_length=4),
    _batches_without("is_medusa", lambda v: not v["is_medusa"], **TREE),
    _batches_without("is_block_kv_layout", lambda v: not v["is_block_kv_layout"], is_block_kv_layout=True),
)

BUCKET_NOTES: Final = (
    Note(
        lambda v: not v["enable_bucketing"] and any(v[name] for name in _LISTS),
        "neuron_config: bucket lists are ignored because enable_bucketing is false",
        doubtful={"prefix_buckets": [64]},
    ),
    Note(
        lambda v: _has_prompts_beyond_buckets(v) and not TARGETS[v["target"]].computes_chunks("right"),
        "neuron_config.context_encoding_buckets: prompts longer than the last bucket are refused, although "
        "max_context_length is {max_context_length}",
        doubtful={"enable_bucketing": True, "context_encoding_buckets": [64]},
        plain={"enable_bucketing": True, "context_encoding_buckets": [64, 128]},
    ),
    Note(
        lambda v: (
            _has_prompts_beyond_buckets(v)
            and TARGETS[v["target"]].computes_chunks("right")
            and not TARGETS[v["target"]].computes_chunks(v["padding_side"])
        ),
        "neuron_config.padding_side: prompts longer than the last of context_encoding_buckets are refused, although "
        "max_context_length is {max_context_length}: their chunks would have to be padded on the right",
        doubtful={"enable_bucketing": True, "context_encoding_buckets": [64], "padding_side": "left"},
        plain={"enable_bucketing": True, "context_encoding_buckets": [64]},
        target=CPU.kind,
    ),
    Note(
        lambda v: v["enable_bucketing"] and 0 < _last(v["token_generation_buckets"]) < v["seq_len"],
        "neuron_config.token_generation_buckets: sequences end at the last bucket, although seq_len is {seq_len}",
        doubtful={"enable_bucketing": True, "token_generation_buckets": [64]},
        plain={"enable_bucketing": True, "token_generation_buckets": [64, 128]},
    ),
    Note(
        lambda v: v["enable_bucketing"] and bool(v["prefix_buckets"]) and not v["is_prefix_caching"],
        "neuron_config.prefix_buckets: they are ignored because is_prefix_caching is false",
        doubtful={"enable_bucketing": True, "prefix_buckets": [64]},
        plain={"enable_bucketing": True},
    ),
)
