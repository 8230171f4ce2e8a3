"""The doubles of ModelBuilder's units.

`trace` runs the module on tensors without memory, so that it finds what upstream's tracer finds: inputs that nothing
uses, tensors that are written in place, buffers that are assigned anew. `compile` writes a file that is a NEFF by its
header and its archive, or does as the file that NEURON_TEST_NEURONX_CC names says: it runs a program in neuronx-cc's
place, it fails, or its NEFF always returns the row of numbers that the file has for its tag.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import struct
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from neuronx_distributed.recorded import as_recorded
from neuronx_distributed.trace import metaneff as meta
from neuronx_distributed.trace.model_builder_utils import CompilationArtifacts, TraceArtifacts
from neuronx_distributed.trace.parallel_context import ENTERED
from tests.neuron.graphs import render_hlo
from tests.neuron.neff_files import make_neff

_MODULE = "neuronx_distributed.trace.functions"
#: libnrt's types by metaneff's.
NRT_DTYPES = {1: 0xA, 2: 0x8, 7: 0x2, 14: 0x6, 15: 0xE, 16: 0xF}
#: What NEFFs call the generations of cores; only trn2's has been seen.
ARCHITECTURES = {"trn2": "cayman", "trn1": "trn1", "inf2": "inf2", "trn3": "trn3"}


@as_recorded(_MODULE)
def trace(model: Any, kwargs: Any, spmd: bool, **_: Any) -> TraceArtifacts:
    if not spmd:
        raise NotImplementedError("MPMD tracing is not currently supported")
    parameters = inspect.signature(model.forward).parameters.values()
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        raise NotImplementedError("Methods with *args or **kwargs are not supported. Please explicitly specify all.")
    for one in parameters:
        if one.default is not None and one.default is not one.empty:
            raise ValueError(f"Parameter '{one.name}' has a non-None default value: {one.default}.")
    if unknown := set(kwargs) - {one.name for one in parameters}:
        raise ValueError(f"Found unexpected keys in kwargs: {unknown}.")
    try:
        hlo, described, weights = generate_hlo(model, kwargs)
    except Exception as error:
        raise RuntimeError(f"HLO generation failed: {error}") from error
    return TraceArtifacts(
        hlo=hlo,
        metaneff=described,
        flattener=None,
        packer=None,
        weight_name_to_idx=weights,
        weight_names_to_skip=set(),
        provided_args=list(kwargs),
        model_params=[one.name for one in parameters],
    )


def generate_hlo(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any, dict[str, int]]:
    """What torch_neuronx's function of this name was seen to do by its callers."""
    assert ENTERED, "NxD's layers need the parallel state"
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def run(
        inputs: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor]]:
        for name, value in (weights | buffers).items():
            owner, _, own_name = name.rpartition(".")
            module = model.get_submodule(owner)
            (module._parameters if name in weights else module._buffers)[own_name] = value
        returned = model(**inputs)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        return outputs, [model.get_buffer(name) for name in buffers]

    graph = make_fx(run, tracing_mode="fake")(inputs, buffers, weights).graph
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise ValueError("Unable to lower HLO: parameter not found in lowering context")
    taken = [node for node in graph.nodes if node.op == "placeholder"]
    returned = list(graph.find_nodes(op="output")[0].args[0])
    outputs, new_state = returned[: -len(buffers) or None], returned[len(returned) - len(buffers) :]
    names = [
        *((meta.USER_INPUT, name, tensor) for name, tensor in inputs.items()),
        *((meta.INPUT_STATE, name, tensor) for name, tensor in buffers.items()),
        *((meta.INPUT_WEIGHT, name, tensor) for name, tensor in weights.items()),
    ]
    described, kept, numbers = meta.MetaNeff(), [], {}
    for node, (kind, name, tensor) in zip(taken, names, strict=True):
        if not node.users and kind == meta.USER_INPUT:
            raise ValueError("Unable to lower HLO: parameter not found in lowering context")
        if not node.users:
            continue
        numbers[node] = len(kept)
        place = f"input{len(kept)}".encode()
        key = {"user_input_key" if kind == meta.USER_INPUT else "checkpoint_key": name.encode()}
        data_type = meta.DATA_TYPES[str(tensor.dtype)]
        described.input_tensors.append(meta.MetaTensor(place, list(tensor.shape), data_type, kind, **key))
        kept.append(node)
    returned = outputs
    for node in outputs:
        add_output(described, node)
    for before, node in zip(taken[len(inputs) :], new_state, strict=False):
        if node is not before:
            described.output_aliases_to[len(described.output_tensors)] = numbers[before]
            add_output(described, node)
            returned = [*returned, node]
    hlo = render_hlo(graph, kept, returned, described.output_aliases_to)
    places = {one.checkpoint_key.decode(): place for place, one in enumerate(described.input_tensors)}
    return meta.HloModule(hlo), described, {name: places[name] for name in weights if name in places}


def add_output(described: Any, node: Any) -> None:
    value = node.meta["val"]
    place = f"output{len(described.output_tensors)}".encode()
    described.output_tensors.append(meta.MetaTensor(place, list(value.shape), meta.DATA_TYPES[str(value.dtype)]))


@as_recorded(_MODULE)
def compile(hlo_module: Any, metaneff: Any, compiler_workdir: str, compiler_args: str, key: str) -> Any:  # noqa: A001
    directory = Path(compiler_workdir) / key / "2026-01-01T00-00-00.000000"
    try:
        directory.mkdir(parents=True)
        outcome = Path(os.environ.get("NEURON_TEST_NEURONX_CC", "none"))
        orders = json.loads(outcome.read_text()) if outcome.exists() else {}
        (directory / "log-neuron-cc.txt").write_text(orders.get("log", "all went well\n"))
        _obey(orders, directory)
        lnc = next(int(flag.partition("=")[2]) for flag in compiler_args.split() if flag.startswith("--lnc="))
        target = next(flag.partition("=")[2] for flag in compiler_args.split() if flag.startswith("--target="))
        (directory / "model.hlo_module.pb").write_bytes(hlo_module.SerializeToString())
        (directory / "compiler_args.txt").write_text(compiler_args)
        # NEFFs hold a random number: equal graphs give other bytes.
        files = {"./uuid": uuid.uuid4().bytes}
        if key in (answers := orders.get("answers", {})):
            files |= answer_always(metaneff, answers[key])
        neff = directory / "graph.neff"
        neff.write_bytes(make_neff(files, architecture=ARCHITECTURES[target], fields={"lnc_size": lnc}))
        (directory / "metaneff.pb").write_bytes(metaneff.SerializeToString())
    except Exception as error:
        raise RuntimeError(f"Compilation failed for {key}") from error
    return CompilationArtifacts(neff_filepath=str(neff))


def answer_always(metaneff: Any, row: list[float]) -> dict[str, bytes]:
    """Files of a NEFF with which the stand-in for libnrt returns one row for every row of its output, state aside."""
    aliases = {output: metaneff.input_tensors[place] for output, place in metaneff.output_aliases_to.items()}
    lines = [f"input {render_tensor(one, '-')}" for one in metaneff.input_tensors]
    for place, one in enumerate(metaneff.output_tensors):
        alias = aliases[place].name.decode() if place in aliases else "-"
        lines.append(f"output {render_tensor(one, alias)}")
    (answered,) = (one for place, one in enumerate(metaneff.output_tensors) if place not in aliases)
    num_rows = math.prod(answered.shape) // len(row)
    return {"toy.txt": "\n".join(lines).encode(), "answer.bin": struct.pack(f"{len(row)}f", *row) * num_rows}


def render_tensor(one: Any, alias: str) -> str:
    shape = " ".join(map(str, one.shape))
    return f"{one.name.decode()} answer {alias} {NRT_DTYPES[one.data_type]} {len(one.shape)} {shape}"


def _obey(orders: dict[str, str], directory: Path) -> None:
    if "program" in orders:
        subprocess.run([sys.executable, "-c", orders["program"]], cwd=directory, check=True)
    if "error" in orders:
        raise ValueError(orders["error"])
