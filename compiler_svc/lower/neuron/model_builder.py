"""The front end `model_builder`: NxD's ModelBuilder, by its units, one executable at a time. The only file that imports
Neuron's packages, at the versions of `targets.neuron_releases`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from resource import RUSAGE_CHILDREN, getrusage
from subprocess import CalledProcessError
from typing import Any, Final

from torch import Tensor

from compiler_svc.lower.errors import (
    NeuronCompilerFailed,
    NeuronGraphRefused,
    NeuronMemoryExceeded,
    NeuronTraceFailed,
)
from compiler_svc.lower.neuron.flags import render_flags
from compiler_svc.lower.neuron.hlo import HloModule, drop_sources, read_hlo
from compiler_svc.lower.neuron.hlo_check import check_hlo
from compiler_svc.lower.neuron.largest import make_operators
from compiler_svc.lower.neuron.request import NeuronExecutable, NeuronRequest
from compiler_svc.lower.neuron.submodel import MakeSubmodel, Submodel
from compiler_svc.lower.neuron.tensor_map import map_tensors
from compiler_svc.lower.xla import register_operators
from execution.failure import name_cause
from targets.neuron import TOP_K_WAYS

_CODE: Final = re.compile(r"NCC_[A-Z]+\d+")
#: Codes of executables that a core has no memory for, with activations or alone.
_MEMORY_CODES: Final = frozenset({"NCC_EOOM001", "NCC_EOOM002", "NCC_EVRF009", "NCC_EXSP001"})
#: neuronx-cc's log, below the folder that it works in.
_LOG_FILE: Final = "log-neuron-cc.txt"
_LOG_TAIL_LINES: Final = 20
#: How torch-neuronx tells the exit code, if it runs neuronx-cc; a signal's is negative.
_EXIT_CODE: Final = re.compile(r"neuronx-cc failed with (-?\d+)")

#: What the tracer says, and what it means for a submodel.
_TRACE_ADVICE: Final[Sequence[tuple[str, str]]] = (
    (
        "parameter not found in lowering context",
        "an input or buffer is not used, or an operation writes one in place",
    ),
    ("*args", "a submodel names each of its inputs"),
    ("non-None default", "inputs of a submodel have no default but None"),
)


def compile_submodel(request: NeuronRequest) -> NeuronExecutable:
    """Traces a submodel, checks its graph, and compiles it."""
    from neuronx_distributed import NxDParallelState  # noqa: PLC0415 - in this interpreter alone

    make_submodel: MakeSubmodel = resolve_name(request.make_module)
    ranks = NxDParallelState(
        world_size=request.tp_degree,
        tensor_model_parallel_size=request.tp_degree,
        lnc_size=request.logical_nc_config,
    )
    with ranks, register_operators(**OPERATORS[request.top_k]):
        submodel = make_submodel(request.document)
        traced = _trace(submodel, request.tag)
        debuggable: bytes = traced.hlo.SerializeToString()
        tensors = map_tensors(traced.metaneff, submodel)
        module = read_hlo(debuggable)
        _check(module, tensors.mistakes, request)
        # Findings name lines. neuronx-cc and bundles get none: they are paths of this host.
        graph = drop_sources(debuggable)
        traced.hlo.ParseFromString(graph)
        request.directory.mkdir(parents=True, exist_ok=True)
        (path := request.directory / "graph.hlo").write_bytes(graph)
        (metaneff := request.directory / "metaneff.pb").write_bytes(traced.metaneff.SerializeToString())
        neff = _compile(traced, request)
    program = tensors.to_program(is_collective=module.has_collectives, flags=request.flags)
    return NeuronExecutable(neff=neff, graph=path, metaneff=metaneff, program=program)


def _call_argmax(values: Tensor) -> Tensor:
    from torch_neuronx.xla_impl.ops import Argmax  # noqa: PLC0415 - in this interpreter alone

    places: Tensor = Argmax.apply(values, dim=1, keepdim=False)
    return places


def _call_top_k(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    from torch_neuronx.xla_impl.ops import TopK  # noqa: PLC0415 - in this interpreter alone

    largest, places = TopK.apply(values, count, dim=1)
    return largest, places


#: Of graphs that neuronx-cc gets, by how they take candidates.
OPERATORS: Final = {way: make_operators(_call_argmax, _call_top_k, most) for way, most in TOP_K_WAYS.items()}


def _trace(submodel: Submodel, tag: str) -> Any:
    from neuronx_distributed.trace.functions import trace  # noqa: PLC0415 - in this interpreter alone

    try:
        return trace(submodel.module, kwargs=dict(submodel.examples), spmd=True, preserve_parameters=False)
    except Exception as error:
        # NxD raises errors of many kinds, and wraps those of the tracer in a RuntimeError.
        cause = _describe(error)
        advice = next((advice for words, advice in _TRACE_ADVICE if words in cause), "")
        raise NeuronTraceFailed(tag, cause, advice) from error


def _check(module: HloModule, mistakes: Sequence[str], request: NeuronRequest) -> None:
    found = check_hlo(module, target=request.target, memory_bytes=request.memory_bytes)
    codes = sorted({one.code for one in found})
    if codes and _MEMORY_CODES.issuperset(codes) and not mistakes:
        raise NeuronMemoryExceeded(request.tag, codes, "\n".join(map(str, found)))
    if found or mistakes:
        raise NeuronGraphRefused(request.tag, [*map(str, found), *mistakes], [code for code in codes if code])


def _compile(traced: Any, request: NeuronRequest) -> Path:
    from neuronx_distributed.trace.functions import compile  # noqa: A004, PLC0415 - NxD's name; in this interpreter

    try:
        compiled = compile(
            hlo_module=traced.hlo,
            metaneff=traced.metaneff,
            compiler_workdir=str(request.directory),
            compiler_args=render_flags(request.flags),
            key=request.tag,
        )
    except Exception as error:
        # NxD wraps whatever went wrong in a RuntimeError.
        text = f"{_read_log(request.directory)}\n{_describe(error)}"
        codes = sorted(set(_CODE.findall(text)))
        kind = NeuronMemoryExceeded if _MEMORY_CODES.intersection(codes) else NeuronCompilerFailed
        tail = text.replace(str(request.directory), "…").strip()
        peak_bytes = 1024 * getrusage(RUSAGE_CHILDREN).ru_maxrss
        raise kind(request.tag, codes, tail, _find_cause(error), peak_bytes) from error
    return Path(compiled.neff_filepath)


def _read_log(directory: Path) -> str:
    """The last lines of the newest log below a folder."""
    logs = sorted(directory.rglob(_LOG_FILE), key=os.path.getmtime)
    lines = logs[-1].read_text(errors="replace").splitlines() if logs else []
    return "\n".join(lines[-_LOG_TAIL_LINES:])


def _find_cause(error: BaseException) -> str:
    """The exit code or signal of neuronx-cc; empty if no error tells."""
    for one in _list_causes(error):
        if isinstance(one, CalledProcessError):
            return name_cause(one.returncode)
        if told := _EXIT_CODE.search(str(one)):
            return name_cause(int(told[1]))
    return ""


def _describe(error: BaseException) -> str:
    return "; caused by ".join(f"{type(one).__name__}: {one}" for one in _list_causes(error))


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
