"""Submodels as their callers see them: names, shapes and dtypes of inputs, outputs and state, by `bundle.abi`."""

from __future__ import annotations

from dataclasses import dataclass

from bundle.abi import state_names
from bundle.manifest import StateLayout, StateTensor, Submodel, TensorSpec
from compiler_svc.trace.graph_spec import GraphSpec

KV_AXES = ("slot", "kv_head", "position", "head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmodelSpec:
    """The calling convention of one executable, with the fields of `bundle.manifest.Executable`."""

    tag: str
    submodel: Submodel
    bucket: tuple[int, ...]
    batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[str, ...]
    flags: tuple[str, ...]


def describe_submodel(spec: GraphSpec, submodel: Submodel, bucket: int) -> SubmodelSpec:
    """Describes one executable.

    Args:
        bucket: context_encoding: tokens of a prompt row; token_generation: positions that are read. At most
            `spec.max_length`.
    """
    assert 0 < bucket <= spec.max_length, f"bucket {bucket} of {spec.max_length} positions"
    if submodel == "context_encoding":
        rows, columns = spec.ctx_batch_size, bucket
    else:
        rows, columns = spec.tkg_batch_size, 1
    inputs = [_int32("input_ids", rows, columns), _int32("position_ids", rows, columns), _int32("seq_ids", rows)]
    if submodel == "context_encoding":
        inputs.append(_int32("num_tokens", rows))
    flags = ["left_padded"] if submodel == "context_encoding" and spec.padding_side == "left" else []
    if spec.takes_sampling_params:
        inputs.append(TensorSpec(name="sampling_params", dtype="float32", shape=(rows, 3)))
        flags.append("sampling_params")
    if spec.takes_rand:
        inputs.append(TensorSpec(name="rand", dtype="float32", shape=(rows, 1)))
        flags.append("rand")
    outputs = []
    if spec.samples_on_device:
        outputs.append(_int32("tokens", rows))
    if spec.returns_logits:
        outputs.append(TensorSpec(name="logits", dtype="float32", shape=(rows, spec.description.vocab_size)))
    return SubmodelSpec(
        tag=f"{submodel}_{bucket}",
        submodel=submodel,
        bucket=(bucket,),
        batch_size=rows,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        state=state_names(len(spec.description.layers)),
        flags=tuple(sorted([*flags, *(output.name for output in outputs)])),
    )


def describe_state(spec: GraphSpec) -> StateLayout:
    """Describes the KV cache of every rank."""
    states = spec.description.states
    tensors = []
    for number, name in enumerate(state_names(len(states))):
        heads = states[number // 2].heads
        shape = (spec.num_slots + 1, heads.layout(spec.tp_degree).num_kv_heads, spec.max_length, heads.head_dim)
        tensors.append(StateTensor(name=name, dtype=spec.dtype, shape=shape, axes=KV_AXES))
    layout = states[0].heads.layout(spec.tp_degree)
    return StateLayout(tensors=tuple(tensors), num_slots=spec.num_slots, kv_heads_by_rank=layout.kv_heads)


def _int32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="int32", shape=shape)
