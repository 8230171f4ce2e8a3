"""NeuronConfig: general, distributed, compilation and debugging attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from compiler_svc.config.attribute import HONOURED, Alias, Derivation, Values, attribute, hint, refused, same_as
from compiler_svc.config.domains import LENGTH, choice, integer
from compiler_svc.config.rule import KILN, Note, Rule, at_most
from compiler_svc.config.tables.documents import (
    COMPILATION,
    DEBUGGING,
    DISTRIBUTED,
    GENERAL,
    UNDOCUMENTED,
)
from targets.cpu import CPU
from targets.registry import TARGETS
from targets.target import Target

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: Final = choice(get_args(DType), prefix="torch.")
DEFAULT_DTYPE: Final = "bfloat16"
NEURON_ONLY: Final = hint("it concerns NeuronCores only")
NO_SIZE: Final = hint("no size of a plan depends on it")

_ALWAYS_ASYNCHRONOUS: Final = hint(
    "the runtime always works on the output of one step while the next one runs, and calls the one after it if "
    "tokens are picked on the device",
    acts_as=True,
)
_ONE_LAYOUT: Final = hint("no layouts are optimized: weights stay as shards have them")
_LIMITS_REQUESTS: Final = "limits generated buckets, prompts and sequences; NxD Inference notes it only"
_ONE_CORE: Final = refused("a logical core is one physical core there")
_NEURON_TARGETS: Final = tuple(target for target in TARGETS.values() if target is not CPU)
_PAIRED: Final = " and ".join(target.kind for target in _NEURON_TARGETS if target.logical_core_size == 2)


def _new_tokens_left(values: Values) -> int | None:
    left: int = values["seq_len"] - values["max_context_length"]
    return left if left > 0 else None


def _checkpoint_dtype(values: Values) -> str:
    # A draft model computes as its target does, which stands in the configuration around it.
    target_model = values["outer"]["outer"].get("outer")
    return target_model["neuron_config"]["torch_dtype"] if target_model else values["checkpoint_dtype"] or DEFAULT_DTYPE


@dataclass(frozen=True, kw_only=True)
class GeneralAttributes:
    """Sizes, dtypes and degrees; most defaults are derived from these, so they stand first."""

    batch_size: int = attribute(GENERAL, integer(1), default=1)
    padding_side: Literal["right", "left"] = attribute(GENERAL, default="right", neuron=NO_SIZE)
    seq_len: int = attribute(GENERAL, LENGTH, default=128)
    max_context_length: int = attribute(
        GENERAL,
        LENGTH,
        default=same_as("seq_len"),
        note="NxD Inference compares it with max_length only, so that it may exceed seq_len",
    )
    max_new_tokens: int | None = attribute(
        GENERAL,
        LENGTH,
        default=Derivation(_new_tokens_left, "seq_len - max_context_length, or no limit of its own if that is 0"),
        neuron=NO_SIZE,
        note="NxD Inference's default is negative if max_context_length exceeds seq_len",
    )
    max_length: int = attribute(GENERAL, LENGTH, default=same_as("seq_len"))
    n_active_tokens: int = attribute(GENERAL, LENGTH, default=same_as("seq_len"), note=_LIMITS_REQUESTS)
    n_positions: int = attribute(GENERAL, LENGTH, default=same_as("seq_len"), note=_LIMITS_REQUESTS)
    torch_dtype: DType = attribute(
        GENERAL,
        DTYPES,
        default=Derivation(
            _checkpoint_dtype,
            "the checkpoint's dtype, or bfloat16 if it names none; for a draft model, the target's",
        ),
        note="the API guide says bfloat16 by default; casting a float32 checkpoint to it loses digits",
    )
    rpl_reduce_dtype: DType | None = attribute(
        GENERAL, DTYPES, neuron=NO_SIZE, note="unset: the dtype of the input; the API reference 0.1 says torch_dtype"
    )
    cast_type: Literal["config", "as-declared"] = attribute(GENERAL, default="config")
    async_mode: bool = attribute(
        GENERAL, default=False, cpu=_ALWAYS_ASYNCHRONOUS, neuron=NO_SIZE, compiled=_ALWAYS_ASYNCHRONOUS
    )
    save_sharded_checkpoint: bool = attribute(
        GENERAL, default=True, neuron=NO_SIZE, note="false by default in the feature guide and in NxD Inference's code"
    )
    skip_sharding: bool = attribute(GENERAL, default=False, neuron=NO_SIZE)
    logical_nc_config: int = attribute(
        GENERAL,
        integer(1, 2),
        default=Derivation(lambda values: TARGETS[values["target"]].logical_core_size, f"2 on {_PAIRED}, otherwise 1"),
        cpu=NEURON_ONLY,
        compiled=HONOURED,
        exceptions={target.kind: _ONE_CORE for target in _NEURON_TARGETS if target.logical_core_sizes == (1,)},
        aliases=(Alias("logical_neuron_cores", note="deprecated, the former name of logical_nc_config"),),
        note="NEURON_LOGICAL_NC_CONFIG is not read: a request has to compile to the same bundle everywhere; trn3's is "
        "unverified",
    )
    skip_warmup: bool = attribute(GENERAL, default=False, neuron=NO_SIZE)
    weights_to_skip_layout_optimization: tuple[str, ...] = attribute(
        GENERAL,
        default=(),
        cpu=NEURON_ONLY,
        neuron=NO_SIZE,
        compiled=_ONE_LAYOUT,
        note="NxD Inference reads it from SDK 2.28 on",
    )
    scratchpad_page_size: int | None = attribute(
        GENERAL,
        integer(1),
        cpu=NEURON_ONLY,
        compiled=HONOURED,
        note="unset: the compiler's own; NxD Inference sets 1024 from a max_context_length of 32768 on",
    )
    allow_input_truncation: bool = attribute(UNDOCUMENTED, default=False, neuron=NO_SIZE)
    # 64 is the largest degree that the documents describe; collectives serve more.
    tp_degree: int = attribute(
        DISTRIBUTED,
        integer(1, 64),
        default=1,
        note="heads that it does not divide are padded and replicated, as in NxD Inference, although the guide refuses "
        "them; trn3's degrees are unverified",
    )
    vocab_parallel: bool = attribute(
        UNDOCUMENTED, default=False, note="divides the embedding along the vocabulary; a tied head shares its part"
    )
    cc_pipeline_tiling_factor: int = attribute(
        COMPILATION, integer(1), default=2, cpu=NEURON_ONLY, neuron=NO_SIZE, compiled=HONOURED
    )
    output_logits: bool = attribute(DEBUGGING, default=False, neuron=NO_SIZE)
    output_prompt_logprobs: bool | None = attribute(
        UNDOCUMENTED,
        note="log probabilities of the tokens of prompts, for requests that ask; every prompt pays for them",
    )
    output_embeddings: bool | None = attribute(
        UNDOCUMENTED, neuron=NO_SIZE, note="hidden states of prompts behind the last norm, for Embed"
    )

    @property
    def logical_neuron_cores(self) -> int:
        """Former name of `logical_nc_config`."""
        return self.logical_nc_config


# That a prompt fits max_length follows from the first two.
LENGTH_RULES: Final = (
    at_most("max_context_length", "seq_len", section=GENERAL, because="a sequence begins with its prompt"),
    Rule(
        ("max_length", "seq_len"),
        lambda v: v["max_length"] >= v["seq_len"],
        "at least seq_len, which is {seq_len}: the KV cache holds whole sequences",
        KILN,
        breaks={"seq_len": 64, "max_length": 63},
        keeps={"seq_len": 64, "max_length": 64},
    ),
    at_most("max_new_tokens", "seq_len", "max_context_length", section=GENERAL),
    Rule(
        ("n_positions", "max_length", "seq_len"),
        lambda v: v["max_length"] < v["seq_len"] or v["n_positions"] <= v["max_length"],
        "at most max_length, which is {max_length}: every position has its place in the KV cache",
        KILN,
        breaks={"seq_len": 64, "n_positions": 65},
        keeps={"seq_len": 64, "n_positions": 65, "max_length": 65},
    ),
    at_most("n_active_tokens", "seq_len", section=KILN, because="the active tokens of a row are of one sequence"),
)

LENGTH_NOTES: Final = (
    Note(
        lambda v: v["max_length"] > v["seq_len"],
        "neuron_config.max_length: KV positions beyond seq_len, which is {seq_len}, are never used",
        doubtful={"max_length": 256},
    ),
    Note(
        lambda v: v["n_positions"] < v["seq_len"],
        "neuron_config.n_positions: sequences end at {n_positions} tokens, although seq_len is {seq_len}",
        doubtful={"n_positions": 64},
    ),
    Note(
        lambda v: v["n_active_tokens"] < min(v["max_context_length"], v["n_positions"]),
        "neuron_config.n_active_tokens: prompts are at most {n_active_tokens} tokens, although max_context_length is "
        "{max_context_length}",
        doubtful={"n_active_tokens": 64},
        plain={"n_active_tokens": 64, "max_context_length": 64},
    ),
)


_SAMPLING: Final = "on_device_sampling_config"


def _runtime_has_degree(target: Target) -> Rule:
    *most, last = map(str, target.tp_degrees)
    note = f", which are {target.tp_degrees_note}" if target.tp_degrees_note else ""
    return Rule(
        ("tp_degree",),
        lambda v: v["tp_degree"] in target.tp_degrees,
        f"{', '.join(most)} or {last}: the degrees of {target.kind}{note}",
        DISTRIBUTED,
        breaks={"tp_degree": 3},
        keeps={"tp_degree": target.tp_degrees[-1]},
        target=target.kind,
    )


def _orders_candidates(target: Target, most: int) -> Rule:
    return Rule(
        (f"{_SAMPLING}.global_topk",),
        lambda v: _count_candidates(v) in range(1, most + 1),
        f"from 1 to {most} where tokens are sampled: the compiler for {target.kind} has no sort",
        KILN,
        breaks={_SAMPLING: {"dynamic": True, "global_topk": most + 1}},
        keeps={_SAMPLING: {"dynamic": True, "global_topk": most}},
        target=target.kind,
    )


def _count_candidates(values: Values) -> int:
    """The candidates that sampling in the executable puts in order, 0 being all; 1 if there is no sampling in it."""
    sampling = values[_SAMPLING]
    picks_others = sampling is not None and (sampling["do_sample"] or sampling["dynamic"])
    return int(sampling["global_topk"]) if picks_others else 1


TARGET_RULES: Final = (
    *(_runtime_has_degree(target) for target in TARGETS.values() if not target.takes_other_degrees),
    *(
        _orders_candidates(target, target.max_candidates)
        for target in TARGETS.values()
        if target.max_candidates is not None
    ),
)
