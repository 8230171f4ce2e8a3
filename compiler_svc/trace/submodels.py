"""Executable specs: names, shapes and dtypes of executables' inputs, outputs, state and adapters, by `bundle.abi`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bundle.abi.inputs import LEFT_PADDED, PROCESSORS, WORD_BITS, inputs_of
from bundle.abi.outputs import MAX_PROMPT_CANDIDATES, outputs_of
from bundle.abi.state import AXES, BLOCK_AXES, StateLayout, StateTensor
from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import AbiTensor, DType, Symbols
from bundle.manifest import ADAPTER_WEIGHTS, TensorSpec, WeightSet, WeightShard, WeightTensor
from compiler_svc.trace.graph_spec import GraphSpec
from execution.sampling_parameters import MAX_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutableSpec:
    """The calling convention of one executable, with the fields of `bundle.manifest.Executable`."""

    tag: str
    submodel: SubmodelName
    bucket: tuple[int, ...]
    batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[str, ...]
    flags: tuple[str, ...]

    def graph_key(self, spec: GraphSpec) -> ExecutableSpec:
        """What the graph depends on besides the graph spec: executables with equal keys have equal graphs."""
        return replace(self, tag="", bucket=()) if spec.skips_idle else self


def describe_submodel(
    spec: GraphSpec,
    submodel: SubmodelName,
    bucket: int,
    *,
    rows: int | None = None,
    prefix: int | None = None,
    processes: bool = False,
) -> ExecutableSpec:
    """Describes one executable.

    `bucket`, at most `spec.max_length`, counts tokens of a row, or positions that are read, depending on the submodel.
    `rows` are those of a step, if the submodel has executables of several batch sizes; None: the submodel's. `prefix`
    counts cached tokens before those of a row, if buckets bound these too. With `processes`, it is the executable that
    changes logits before it picks tokens.
    """
    assert 0 < bucket <= spec.max_length, f"bucket {bucket} of {spec.max_length} positions"
    row = SUBMODELS[submodel]
    assert row.is_served, submodel
    symbols: Symbols = {
        "R": rows or getattr(spec, row.rows),
        "T": row.tokens if isinstance(row.tokens, int) else bucket,
        "K": 1,
        "L": min(MAX_PROMPT_CANDIDATES, spec.description.vocab_size),
        "H": spec.description.head.inputs.length,
        "N": -(-spec.max_length // spec.block_tokens) if spec.block_tokens else 1,
        "V": spec.description.vocab_size,
        "rank_V": spec.description.head.outputs.part_length(spec.tp_degree),
        "W": -(-spec.description.vocab_size // WORD_BITS),
        "B": min(spec.description.vocab_size, spec.max_length + MAX_TOKENS),
    }
    flags = spec.flags if processes else spec.flags - {PROCESSORS, "cuts"}
    inputs, outputs = inputs_of(submodel, flags), outputs_of(submodel, flags)
    shape = "x".join(str(one) for one in (rows, bucket, prefix) if one is not None)
    return ExecutableSpec(
        tag="_".join([submodel, shape, *([PROCESSORS] if processes else [])]),
        submodel=submodel,
        bucket=(bucket,) if prefix is None else (bucket, prefix),
        batch_size=symbols["R"],
        inputs=_specify(inputs, symbols, spec.dtype),
        outputs=_specify(outputs, symbols, spec.dtype),
        state=tuple(row.name for state in spec.description.states for row in state.rows(spec.dtype)),
        flags=tuple(sorted(_keep_own(flags, submodel, (*inputs, *outputs)))),
    )


def _keep_own(flags: Iterable[str], submodel: SubmodelName, tensors: Iterable[AbiTensor]) -> set[str]:
    """Keeps the flags that affect a submodel: the flags of its tensors, and of its padding side if it pads prompts."""
    own = {tensor.flag for tensor in tensors}
    if SUBMODELS[submodel].computes_prompts:
        own.add(LEFT_PADDED)
    return {flag for flag in flags if flag in own}


def _specify(tensors: Iterable[AbiTensor], symbols: Symbols, computed: DType) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.of(tensor, symbols, computed=computed) for tensor in tensors)


def describe_state(spec: GraphSpec) -> StateLayout:
    """Describes the KV cache of every rank."""
    states = spec.description.states
    axes = BLOCK_AXES if spec.num_blocks else AXES
    num_entries = (spec.num_blocks or spec.num_slots) + (0 if spec.has_spare_positions else 1)
    tensors = []
    for state in states:
        num_heads, positions = state.heads.layout(spec.tp_degree).num_kv_heads, spec.count_positions(state)
        is_ring = not spec.num_blocks and positions < spec.max_length
        window = state.window if is_ring and state.window else 0
        for row in state.rows(spec.dtype):
            shape = (num_entries, num_heads, positions + spec.has_spare_positions, row.size)
            tensors.append(StateTensor(name=row.name, dtype=row.dtype, shape=shape, axes=axes, window=window))
    layout = states[0].heads.layout(spec.tp_degree)
    return StateLayout(
        tensors=tuple(tensors),
        num_slots=spec.num_slots,
        kv_heads_by_rank=layout.kv_heads,
        num_blocks=spec.num_blocks,
        block_tokens=spec.block_tokens,
        has_spare_positions=spec.has_spare_positions,
    )


def list_adapter_tensors(spec: GraphSpec) -> tuple[WeightTensor, ...]:
    """Lists the tensors of adapters in every rank, by name; none if no layer has room for adapters."""
    tensors = (
        WeightTensor(name=one.name, dtype=spec.dtype, shape=one.rank_shape(spec.tp_degree))
        for one in spec.description.adapter_parameters()
    )
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def describe_adapters(spec: GraphSpec) -> tuple[WeightSet, ...]:
    """Describes the weights of adapters, which no file has; no set if no layer has room for adapters."""
    tensors = list_adapter_tensors(spec)
    shards = (WeightShard(rank=rank, blob=None, size_bytes=0, tensors=tensors) for rank in range(spec.tp_degree))
    return (WeightSet(name=ADAPTER_WEIGHTS, shards=tuple(shards), is_mutable=True),) if tensors else ()
