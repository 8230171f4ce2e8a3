"""NeuronConfig: general, distributed, compilation and debugging attributes."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import HONOURED, Alias, Attribute, Values, hint, refused, same_as
from compiler_svc.config.domains import Choice, Flag, Integer, TextList
from compiler_svc.config.tables.documents import (
    COMPILATION,
    DEBUGGING,
    DISTRIBUTED,
    GENERAL,
    UNDOCUMENTED,
)

DTYPES: Final = Choice(("float32", "bfloat16", "float16"), prefix="torch.")
DEFAULT_DTYPE: Final = "bfloat16"
NEURON_ONLY: Final = hint("it concerns NeuronCores only")

_ALWAYS_ASYNCHRONOUS: Final = hint(
    "the runtime always works on the output of one step while the next one runs, and calls the one after it where "
    "tokens are picked on the device",
    acts_as=True,
)
_ONE_CORE: Final = refused("a logical core is one physical core there")


def _new_tokens_left(values: Values) -> int | None:
    left: int = values["seq_len"] - values["max_context_length"]
    return left if left > 0 else None


def _checkpoint_dtype(values: Values) -> str:
    # A draft model computes as its target does, which stands in the configuration around it.
    target_model = values["outer"]["outer"].get("outer")
    return target_model["neuron_config"]["torch_dtype"] if target_model else values["checkpoint_dtype"] or DEFAULT_DTYPE


def _cores_by_target(values: Values) -> int:
    return 2 if values["target"] in ("trn2", "trn3") else 1


#: Without `batch_size` nothing else can be derived: it stands first.
GENERAL_ATTRIBUTES: Final = (
    Attribute(name="batch_size", domain=Integer(1), default=1, section=GENERAL),
    Attribute(name="padding_side", domain=Choice(("right", "left")), default="right", section=GENERAL),
    Attribute(name="seq_len", domain=Integer(1), default=128, section=GENERAL),
    Attribute(
        name="max_context_length",
        domain=Integer(1),
        default=same_as("seq_len"),
        derivation="seq_len",
        section=GENERAL,
    ),
    Attribute(
        name="max_new_tokens",
        domain=Integer(1),
        default=_new_tokens_left,
        derivation="seq_len - max_context_length, or no limit of its own where that is 0",
        section=GENERAL,
    ),
    Attribute(name="max_length", domain=Integer(1), default=same_as("seq_len"), derivation="seq_len", section=GENERAL),
    Attribute(
        name="n_active_tokens", domain=Integer(1), default=same_as("seq_len"), derivation="seq_len", section=GENERAL
    ),
    Attribute(name="n_positions", domain=Integer(1), default=same_as("seq_len"), derivation="seq_len", section=GENERAL),
    Attribute(
        name="torch_dtype",
        domain=DTYPES,
        default=_checkpoint_dtype,
        derivation="the checkpoint's dtype, or bfloat16 where it names none; for a draft model, the target's",
        section=GENERAL,
    ),
    Attribute(name="rpl_reduce_dtype", domain=DTYPES, section=GENERAL),
    Attribute(name="cast_type", domain=Choice(("config", "as-declared")), default="config", section=GENERAL),
    Attribute(name="async_mode", domain=Flag(), default=False, section=GENERAL, cpu=_ALWAYS_ASYNCHRONOUS),
    Attribute(name="save_sharded_checkpoint", domain=Flag(), default=True, section=GENERAL),
    Attribute(name="skip_sharding", domain=Flag(), default=False, section=GENERAL),
    Attribute(
        name="logical_nc_config",
        domain=Integer(1, 2),
        default=_cores_by_target,
        derivation="2 on trn2 and trn3, otherwise 1",
        section=GENERAL,
        cpu=NEURON_ONLY,
        exceptions={"inf2": _ONE_CORE, "trn1": _ONE_CORE},
        aliases=(Alias("logical_neuron_cores", note="deprecated, the former name of logical_nc_config"),),
    ),
    Attribute(name="skip_warmup", domain=Flag(), default=False, section=GENERAL),
    Attribute(
        name="weights_to_skip_layout_optimization", domain=TextList(), default=(), section=GENERAL, cpu=NEURON_ONLY
    ),
    Attribute(name="scratchpad_page_size", domain=Integer(1), section=GENERAL, cpu=NEURON_ONLY),
    Attribute(name="allow_input_truncation", domain=Flag(), default=False, section=UNDOCUMENTED),
    # 64 is the largest degree that the documents describe; collectives serve more.
    Attribute(name="tp_degree", domain=Integer(1, 64), default=1, section=DISTRIBUTED),
    Attribute(name="cc_pipeline_tiling_factor", domain=Integer(1), default=2, section=COMPILATION, cpu=NEURON_ONLY),
    Attribute(name="output_logits", domain=Flag(), default=False, section=DEBUGGING, cpu=HONOURED),
)
