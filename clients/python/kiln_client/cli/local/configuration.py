"""Configures a model for one person on this host, from its checkpoint and the runtime's memory.

The compiler's plan knows memory and the model, so the sequence length comes from a plan: see decision 73.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kiln_client.cli.local.lookup import Checkpoint
from kiln_client.compile_requests import BuildOptions, plan_request
from kiln_client.compiler import AsyncCompiler
from kiln_client.errors import FailedPrecondition

#: Longest sequence. Graphs as they are compute all of a bucket, at the golden check, at the load and in each step.
MAX_SEQ_LEN: Final = 4096
MAX_GRAPH_SEQ_LEN: Final = 1024
_STEP_TOKENS: Final = 128
_SHORTEST_PROMPT: Final = 128
#: Each bucket costs a compile. With factor 2 there would be twice as many, and a prompt would be padded half as much.
_BUCKET_FACTOR: Final = 4
#: Of graphs as they are, whose buckets cost an export, a step of the golden check and one at each load.
_GRAPH_BUCKET_FACTOR: Final = 8

#: Attributes that say which lengths there are. If a person gives one, the compiler derives the others.
_LENGTHS: Final = frozenset(
    {
        "enable_bucketing",
        "context_encoding_buckets",
        "token_generation_buckets",
        "max_context_length",
        "max_length",
        "max_new_tokens",
        "n_positions",
        "n_active_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class Given:
    """What a person says of a configuration.

    Attributes:
        document: The values, with NxD Inference's names; may be empty.
        is_file: Whether they come from a file, which says everything but the sizes.
        optimization_level: 0 to 2; None takes the compiler's default.
        is_quick: Whether what is compiled answers short prompts until something better takes over.
    """

    document: Mapping[str, Any]
    is_file: bool
    optimization_level: int | None = None
    is_quick: bool = False

    @property
    def says_something(self) -> bool:
        """Whether a person says anything of how the model is compiled."""
        return bool(self.document) or self.optimization_level is not None

    def with_adapter(self, name: str, path: str) -> Given:
        """The same with an adapter, which comes with the bundle; the compiler makes room for it."""
        neuron = self.document.get("neuron_config") or {}
        lora = neuron.get("lora_config") or {}
        listed = {**(lora.get("lora_ckpt_paths") or {}), name: path}
        lora = {**lora, "lora_ckpt_paths": listed}
        return replace(self, document={**self.document, "neuron_config": {**neuron, "lora_config": lora}})

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that a configuration gets which gives none."""
        return MAX_GRAPH_SEQ_LEN if self.optimization_level == 0 else MAX_SEQ_LEN

    def choose_prompt_buckets(self, seq_len: int) -> list[int]:
        """Chooses few buckets, so that a first compile is short: one if it spends no time on padding."""
        if self.is_quick:
            return [min(_SHORTEST_PROMPT, seq_len)]
        if self.optimization_level == 0:
            return _grow(_SHORTEST_PROMPT, seq_len, _GRAPH_BUCKET_FACTOR)
        pads_left = (self.document.get("neuron_config") or {}).get("padding_side") == "left"
        return _grow(_SHORTEST_PROMPT, seq_len, _BUCKET_FACTOR) if pads_left else [seq_len]

    @property
    def build_options(self) -> BuildOptions:
        """Options of a plan and of a compile."""
        return {} if self.optimization_level is None else {"optimization_level": self.optimization_level}


@dataclass(frozen=True, slots=True)
class Configuration:
    """What to compile. `derived` has the values that no person gave, by attribute of neuron_config."""

    document: Mapping[str, Any]
    derived: Mapping[str, object]

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return _num_ranks(self.document)


async def configure(
    compiler: AsyncCompiler, model: Checkpoint, given: Given, *, batch_size: int, memory_bytes: int
) -> Configuration:
    """Fills in what a configuration leaves out."""
    said: dict[str, Any] = dict(given.document.get("neuron_config") or {})
    sizes = {"batch_size": batch_size}
    # One prompt at a time, behind which the other sequences go on; each request says how its tokens are sampled.
    serving = {"ctx_batch_size": 1, "is_continuous_batching": True, "on_device_sampling_config": {"dynamic": True}}
    derived: dict[str, Any] = {
        name: value for name, value in (sizes if given.is_file else sizes | serving).items() if name not in said
    }
    if "seq_len" not in said:
        planned = {**given.document, "neuron_config": derived | said}
        fitting = await _find_seq_len(compiler, model, planned, memory_bytes, given.build_options)
        derived["seq_len"] = min(fitting, given.max_seq_len)
    if not given.is_file and not said.keys() & _LENGTHS:
        seq_len = (derived | said)["seq_len"]
        buckets = {
            "context_encoding_buckets": given.choose_prompt_buckets(seq_len),
            "token_generation_buckets": [seq_len],
        }
        derived |= {"enable_bucketing": True, **buckets}
    return Configuration({**given.document, "neuron_config": derived | said}, derived)


def _grow(shortest: int, longest: int, factor: int) -> list[int]:
    buckets = []
    while shortest * factor <= longest:
        buckets.append(shortest)
        shortest *= factor
    return [*buckets, longest]


async def _find_seq_len(
    compiler: AsyncCompiler, model: Checkpoint, document: Mapping[str, Any], memory_bytes: int, options: BuildOptions
) -> int:
    """Finds the least of the checkpoint's sequence length, MAX_SEQ_LEN and what fits, in whole steps of 128 tokens."""
    core_memory_bytes = memory_bytes // _num_ranks(document)
    request = plan_request(str(model.path), document, core_memory_bytes=core_memory_bytes, **options)
    plan = await compiler.plan_compile(request)
    fitting = plan.largest.seq_len
    if not fitting:
        parts = ("weights_bytes", "kv_bytes", "activation_bytes", "code_bytes", "lora_bytes")
        needed_bytes = sum(getattr(rank, part) for rank in plan.ranks for part in parts)
        raise FailedPrecondition(
            f"{model.name} needs {needed_bytes / 2**30:.1f} GiB, and the runtime has {memory_bytes / 2**30:.1f} GiB",
            reason="MODEL_TOO_LARGE",
            metadata={"model": model.name, "needed_bytes": needed_bytes, "memory_bytes": memory_bytes},
        )
    longest = min(fitting, MAX_SEQ_LEN)
    return longest - longest % _STEP_TOKENS or longest


def _num_ranks(document: Mapping[str, Any]) -> int:
    return document["neuron_config"].get("tp_degree") or 1
