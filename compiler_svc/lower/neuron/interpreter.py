"""The lowering backend of Neuron targets: asks the interpreter with Neuron's packages for a NEFF, and waits for it.

It runs in a lowering process, whose limits the interpreter inherits. The interpreter runs this compiler's own sources,
so that what the digests of sources cover is what runs. Planning processes ask it for the check of a graph alone.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from subprocess import CalledProcessError
from typing import BinaryIO, Final, TypeVar

from compiler_svc.lower.errors import LoweringFailed, NeuronTraceFailed
from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from compiler_svc.lower.neuron.command import KEEPS_LINES, XLA_ON_CPU, make_command, make_environment
from compiler_svc.lower.neuron.flags import list_variables
from compiler_svc.lower.neuron.request import (
    CheckedGraph,
    GraphRequest,
    NeuronExecutable,
    NeuronRequest,
    read_answer,
    write_request,
)
from execution.failure import Failure
from targets.neuron import FRONT_END, NEFF, NEURON_PYTHON, TOP_K
from targets.registry import TARGETS

#: Among one device, torch-xla leaves collectives out.
_KEEPS_COLLECTIVES: Final = {"XLA_ALWAYS_ALLREDUCE": "1"}
#: Python then writes where it crashed, the innermost call first.
_NAMES_CRASHES: Final = {"PYTHONFAULTHANDLER": "1"}
_OWN_LINE: Final = re.compile(r'File ".*/((?:compiler_svc|execution)/[^"]+)", line (\d+)')
#: How torch-xla ends if it reads the values of a placeholder, for an operator that it leaves to the CPU.
_CRASHES: Final = (Signals.SIGSEGV, Signals.SIGABRT)
#: What the interpreter of a check writes, in the check's directory.
_LOG_FILE: Final = "log.txt"

AnswerT = TypeVar("AnswerT", NeuronExecutable, CheckedGraph)


def lower_submodel(job: LoweringJob) -> LoweredExecutable:
    """Makes a NEFF of a submodel."""
    request = make_request(job)
    variables = {
        # Read when Neuron's packages are imported: this host need not have the device.
        "NEURON_PLATFORM_TARGET_OVERRIDE": request.target,
        "NEURON_LOGICAL_NC_CONFIG": str(request.logical_nc_config),
        **list_variables(request.flags),
    }
    # What the interpreter writes goes into the job's log.
    answer = _ask(request, job.directory, variables, NeuronExecutable)
    return LoweredExecutable(
        tag=job.tag,
        path=answer.neff,
        format=NEFF.name,
        state_convention=NEFF.state_convention,
        constants=tuple(one.tensor for one in answer.program.inputs if one.kind == "weight"),
        neff=answer.program,
        companions={"hlo": answer.graph, "metaneff": answer.metaneff},
    )


def make_request(job: LoweringJob) -> NeuronRequest:
    """Says what the interpreter is to make."""
    submodel, target = job.neuron, TARGETS[job.options.target.kind]
    assert submodel is not None, "jobs for Neuron targets have a submodel"
    core_bytes = target.core_bytes
    return NeuronRequest(
        front_end=NEURON_PYTHON.read_choice(FRONT_END),
        top_k=NEURON_PYTHON.read_choice(TOP_K),
        tag=job.tag,
        make_module=submodel.make_module,
        document=submodel.document,
        flags=submodel.flags,
        target=target.kind,
        logical_nc_config=submodel.logical_nc_config,
        tp_degree=submodel.tp_degree,
        memory_bytes=None if core_bytes is None else core_bytes * submodel.logical_nc_config,
        directory=job.directory / "neuronx-cc",
    )


def check_graph(request: GraphRequest, directory: Path) -> CheckedGraph:
    """Checks the graph of a submodel for what neuronx-cc would refuse; nothing is compiled."""
    variables = XLA_ON_CPU | _KEEPS_COLLECTIVES | _NAMES_CRASHES
    try:
        with (directory / _LOG_FILE).open("wb") as log:
            return _ask(request, directory, variables, CheckedGraph, log)
    except CalledProcessError as error:
        if -error.returncode not in _CRASHES:
            raise
        line = _OWN_LINE.search(read_log(directory))
        place = f" at {line[1]}:{line[2]}" if line else ""
        cause = f"torch-xla ended with {Signals(-error.returncode).name}{place}"
        raise NeuronTraceFailed(request.tag, cause, "an operator that it does not lower reads values") from error


def read_log(directory: Path) -> str:
    """Reads what the interpreter of a check wrote."""
    return (directory / _LOG_FILE).read_text(errors="replace")


def _ask(
    request: GraphRequest,
    directory: Path,
    variables: Mapping[str, str],
    kind: type[AnswerT],
    log: BinaryIO | None = None,
) -> AnswerT:
    """Runs the interpreter to its end; `log` gets what it writes, None for where this process writes."""
    assert __package__ is not None
    write_request(request, directory)
    subprocess.run(
        make_command(__package__, str(directory)),
        env=make_environment(directory) | KEEPS_LINES | dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=directory,
        check=True,
    )
    answer = read_answer(directory)
    if isinstance(answer, Failure):
        raise answer.to_error()
    if answer is None:
        raise LoweringFailed(request.tag, "an interpreter that gave no answer")
    assert isinstance(answer, kind), answer
    return answer
