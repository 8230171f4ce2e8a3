"""Checks the graphs of a plan for what neuronx-cc would refuse, if the caller asks for it.

torch-xla traces each submodel on the CPU, in the interpreter for Neuron, without weights: one process for each, one at
a time, within the limits of the planning process that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Final

from bundle.errors import FieldViolation
from bundle.manifest import TargetKind
from compiler_svc.errors import ConfigInvalid
from compiler_svc.lower.errors import NeuronTraceFailed
from compiler_svc.lower.memory_watch import tells_refusal
from compiler_svc.lower.neuron.hlo_check import Finding
from compiler_svc.lower.neuron.interpreter import check_graph, read_log
from compiler_svc.lower.neuron.request import GraphRequest
from compiler_svc.planning.build_plan import BuildPlan
from compiler_svc.trace.submodel_document import MAKE_MODULE
from targets.errors import NeuronToolchainMissing
from targets.neuron import NEURON_PYTHON, TOP_K
from targets.registry import TARGETS

#: Findings of one plan that are told. Each takes some hundred bytes, and a graph may have one for each operation.
MAX_FINDINGS: Final = 1000

#: What the interpreter needs for a check. It need not have Neuron's packages beside them.
_NEEDED: Final = ("torch", "torch-xla")
_MAX_LOGGED_CHARS: Final = 4000


@dataclass(frozen=True, slots=True)
class GraphFinding:
    """What neuronx-cc would refuse in the graph of one executable."""

    tag: str
    submodel: str
    bucket: tuple[int, ...]
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCheck:
    """The check of a plan's graphs, of which executables with equal graphs have one. Findings are the first ones, in
    the order of the executables, `MAX_FINDINGS` at most.
    """

    num_graphs: int
    num_findings: int
    findings: tuple[GraphFinding, ...]


def require_checks(kind: TargetKind) -> None:
    """Refuses a check that this host cannot run."""
    interpreter = TARGETS[kind].lowerings[0].toolchain.interpreter
    if interpreter is None:
        kinds = ", ".join(one.kind for one in TARGETS.values() if one.lowerings[0].toolchain.interpreter is not None)
        raise ConfigInvalid([FieldViolation("check_graphs", f"true for {kind}", f"false, or a target of {kinds}")])
    versions = interpreter.list_versions()
    if missing := [name for name in _NEEDED if versions[name] is None]:
        raise NeuronToolchainMissing(interpreter.find(), ", ".join(missing))


def check_graphs(
    build: BuildPlan, model_config: Mapping[str, Any], directory: Path, *, target: TargetKind, memory_bytes: int
) -> GraphCheck:
    """Traces and checks the graph of each executable; `memory_bytes` is the memory of one logical core.

    Raises:
        MemoryError: The interpreter reached the limit of this process's memory.
        RuntimeError: The interpreter ended by a fault; the text is what it wrote.
    """
    distinct = {submodel.graph_key(build.model): submodel for submodel in reversed(build.submodels)}
    found: list[GraphFinding] = []
    for submodel in reversed(distinct.values()):
        request = GraphRequest(
            tag=submodel.tag,
            make_module=MAKE_MODULE,
            document=build.write_submodel(model_config, submodel),
            target=target,
            memory_bytes=memory_bytes,
            top_k=NEURON_PYTHON.read_choice(TOP_K),
        )
        findings = _check(request, directory / submodel.tag)
        found += [GraphFinding(submodel.tag, submodel.submodel, submodel.bucket, one) for one in findings]
    return GraphCheck(num_graphs=len(distinct), num_findings=len(found), findings=tuple(found[:MAX_FINDINGS]))


def _check(request: GraphRequest, directory: Path) -> tuple[Finding, ...]:
    directory.mkdir()
    try:
        return check_graph(request, directory).findings
    except (NeuronTraceFailed, CalledProcessError) as error:
        log = read_log(directory)
        if tells_refusal(f"{log}\n{error}"):
            raise MemoryError from error
        if isinstance(error, NeuronTraceFailed):
            raise
        # For the compiler's log alone: it quotes directories of this host.
        raise RuntimeError(f"the check of {request.tag} ended with {error}:\n{log[-_MAX_LOGGED_CHARS:]}") from error
