"""NeuronConfig: general, distributed, compilation and debugging attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from compiler_svc.config.attribute import HONOURED, Alias, Derivation, Values, attribute, hint, refused, same_as
from compiler_svc.config.domains import LENGTH, Choice, Integer
from compiler_svc.config.tables.documents import (
    COMPILATION,
    DEBUGGING,
    DISTRIBUTED,
    GENERAL,
    UNDOCUMENTED,
)
from targets.cpu import CPU
from targets.registry import TARGETS

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: Final = Choice(get_args(DType), prefix="torch.")
DEFAULT_DTYPE: Final = "bfloat16"
NEURON_ONLY: Final = hint("it concerns NeuronCores only")
NO_SIZE: Final = hint("no size of a plan depends on it")

_ALWAYS_ASYNCHRONOUS: Final = hint(
    "the runtime always works on the output of one step while the next one runs, and calls the one after it if "
    "tokens are picked on the device",
    acts_as=True,
)
_ONE_LAYOUT: Final = hint("no layouts are optimized: weights stay as shards have them")
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

    batch_size: int = attribute(GENERAL, Integer(1), default=1)
    padding_side: Literal["right", "left"] = attribute(GENERAL, default="right", neuron=NO_SIZE)
    seq_len: int = attribute(GENERAL, LENGTH, default=128)
    max_context_length: int = attribute(GENERAL, LENGTH, default=same_as("seq_len"))
    max_new_tokens: int | None = attribute(
        GENERAL,
        LENGTH,
        default=Derivation(_new_tokens_left, "seq_len - max_context_length, or no limit of its own if that is 0"),
        neuron=NO_SIZE,
    )
    max_length: int = attribute(GENERAL, LENGTH, default=same_as("seq_len"))
    n_active_tokens: int = attribute(GENERAL, LENGTH, default=same_as("seq_len"))
    n_positions: int = attribute(GENERAL, LENGTH, default=same_as("seq_len"))
    torch_dtype: DType = attribute(
        GENERAL,
        DTYPES,
        default=Derivation(
            _checkpoint_dtype,
            "the checkpoint's dtype, or bfloat16 if it names none; for a draft model, the target's",
        ),
    )
    rpl_reduce_dtype: DType | None = attribute(GENERAL, DTYPES, neuron=NO_SIZE)
    cast_type: Literal["config", "as-declared"] = attribute(GENERAL, default="config")
    async_mode: bool = attribute(
        GENERAL, default=False, cpu=_ALWAYS_ASYNCHRONOUS, neuron=NO_SIZE, compiled=_ALWAYS_ASYNCHRONOUS
    )
    save_sharded_checkpoint: bool = attribute(GENERAL, default=True, neuron=NO_SIZE)
    skip_sharding: bool = attribute(GENERAL, default=False, neuron=NO_SIZE)
    logical_nc_config: int = attribute(
        GENERAL,
        Integer(1, 2),
        default=Derivation(lambda values: TARGETS[values["target"]].logical_core_size, f"2 on {_PAIRED}, otherwise 1"),
        cpu=NEURON_ONLY,
        compiled=HONOURED,
        exceptions={target.kind: _ONE_CORE for target in _NEURON_TARGETS if target.logical_core_sizes == (1,)},
        aliases=(Alias("logical_neuron_cores", note="deprecated, the former name of logical_nc_config"),),
    )
    skip_warmup: bool = attribute(GENERAL, default=False, neuron=NO_SIZE)
    weights_to_skip_layout_optimization: tuple[str, ...] = attribute(
        GENERAL, default=(), cpu=NEURON_ONLY, neuron=NO_SIZE, compiled=_ONE_LAYOUT
    )
    scratchpad_page_size: int | None = attribute(GENERAL, Integer(1), cpu=NEURON_ONLY, compiled=HONOURED)
    allow_input_truncation: bool = attribute(UNDOCUMENTED, default=False, neuron=NO_SIZE)
    # 64 is the largest degree that the documents describe; collectives serve more.
    tp_degree: int = attribute(DISTRIBUTED, Integer(1, 64), default=1)
    vocab_parallel: bool = attribute(UNDOCUMENTED, default=False)
    cc_pipeline_tiling_factor: int = attribute(
        COMPILATION, Integer(1), default=2, cpu=NEURON_ONLY, neuron=NO_SIZE, compiled=HONOURED
    )
    output_logits: bool = attribute(DEBUGGING, default=False, neuron=NO_SIZE)

    @property
    def logical_neuron_cores(self) -> int:
        """Former name of `logical_nc_config`."""
        return self.logical_nc_config
