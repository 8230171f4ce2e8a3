"""Configures a model for one person on this host, from its checkpoint and the runtime's memory.

The compiler's plan knows memory and the model, so the sequence length comes from a plan: see decision 73.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from kiln_client.compiler import AsyncCompiler, plan_request
from kiln_client.errors import ModelTooLarge
from kiln_client.local.lookup import Checkpoint

MAX_SEQ_LEN: Final = 4096
_STEP_TOKENS: Final = 128
_SHORTEST_PROMPT: Final = 128
#: Each bucket costs a compile. With factor 2 there would be twice as many, and a prompt would be padded half as much.
_BUCKET_FACTOR: Final = 4

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


class BuildOptions(TypedDict, total=False):
    """Options that a plan and a compile share."""

    optimization_level: int
    """As in CompileOptions."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a person says of a configuration.

    Attributes:
        document: The values, with NxD Inference's names; may be empty.
        is_file: Whether they come from a file, which says everything but the sizes.
        optimization_level: 0 to 2; None takes the compiler's default.
    """

    document: Mapping[str, Any]
    is_file: bool
    optimization_level: int | None = None

    @property
    def says_something(self) -> bool:
        """Whether a person says anything of how the model is compiled."""
        return bool(self.document) or self.optimization_level is not None

    @property
    def skips_padding(self) -> bool:
        """Whether what is compiled for this host's processor spends no time on padding."""
        neuron_config = self.document.get("neuron_config") or {}
        return self.optimization_level != 0 and neuron_config.get("padding_side") != "left"

    @property
    def build_options(self) -> BuildOptions:
        """Options of a plan and of a compile."""
        return {} if self.optimization_level is None else {"optimization_level": self.optimization_level}


@dataclass(frozen=True, slots=True)
class Configuration:
    """What to compile.

    Attributes:
        document: The configuration, with NxD Inference's names.
        derived: The values that no person gave, by attribute of neuron_config.
    """

    document: Mapping[str, Any]
    derived: Mapping[str, object]

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return _num_ranks(self.document)


async def configure(
    compiler: AsyncCompiler, model: Checkpoint, given: Given, *, batch_size: int, memory_bytes: int
) -> Configuration:
    """Fills in what a configuration leaves out.

    Args:
        compiler: Client that plans.
        model: What to configure.
        given: What the person says.
        batch_size: Rows of the KV cache.
        memory_bytes: The runtime's memory for deployments.

    Raises:
        ModelTooLarge: Not even the shortest sequences fit.
        KilnError: The configuration is wrong, or the compiler does not build the model.
    """
    said: dict[str, Any] = dict(given.document.get("neuron_config") or {})
    sizes = {"batch_size": batch_size}
    # One prompt at a time, behind which the other sequences go on; each request says how its tokens are sampled.
    serving = {"ctx_batch_size": 1, "is_continuous_batching": True, "on_device_sampling_config": {"dynamic": True}}
    derived: dict[str, Any] = {
        name: value for name, value in (sizes if given.is_file else sizes | serving).items() if name not in said
    }
    if "seq_len" not in said:
        planned = {**given.document, "neuron_config": derived | said}
        derived["seq_len"] = await _find_seq_len(compiler, model, planned, memory_bytes, given.build_options)
    if not given.is_file and not said.keys() & _LENGTHS:
        buckets = choose_buckets((derived | said)["seq_len"], skips_padding=given.skips_padding)
        derived |= {"enable_bucketing": True, **buckets}
    return Configuration({**given.document, "neuron_config": derived | said}, derived)


def choose_buckets(seq_len: int, *, skips_padding: bool) -> dict[str, list[int]]:
    """Chooses few buckets, so that a first compile is short.

    Args:
        seq_len: Longest sequence, in tokens; the last bucket of both submodels.
        skips_padding: Whether executables spend no time on padding, so that one serves prompts of all lengths.
            Otherwise their buckets are each four times as long as the one before.
    """
    prompts = [seq_len] if skips_padding else _grow(_SHORTEST_PROMPT, seq_len)
    return {"context_encoding_buckets": prompts, "token_generation_buckets": [seq_len]}


def _grow(shortest: int, longest: int) -> list[int]:
    buckets = []
    while shortest * _BUCKET_FACTOR <= longest:
        buckets.append(shortest)
        shortest *= _BUCKET_FACTOR
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
        needed = sum(getattr(rank, part) for rank in plan.ranks for part in parts)
        raise ModelTooLarge(model.name, needed, memory_bytes)
    longest = min(fitting, MAX_SEQ_LEN)
    return longest - longest % _STEP_TOKENS or longest


def _num_ranks(document: Mapping[str, Any]) -> int:
    return document["neuron_config"].get("tp_degree") or 1
