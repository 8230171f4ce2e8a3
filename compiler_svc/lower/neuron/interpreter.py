"""The lowering backend of Neuron targets: asks the interpreter with Neuron's packages for a NEFF, and waits for it.

It runs in a lowering process, whose limits the interpreter inherits. The interpreter runs this compiler's own sources,
so that what the digests of sources cover is what runs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from compiler_svc.lower.errors import LoweringFailed
from compiler_svc.lower.job import LoweredExecutable, LoweringJob
from compiler_svc.lower.neuron.command import make_command, make_environment
from compiler_svc.lower.neuron.request import (
    NeuronRequest,
    read_answer,
    write_request,
)
from execution.failure import Failure
from targets.neuron import FRONT_END, NEFF, NEURON_PYTHON
from targets.registry import TARGETS


def lower_submodel(job: LoweringJob) -> LoweredExecutable:
    """Makes a NEFF of a submodel.

    Raises:
        NeuronToolchainMissing: There is no interpreter with Neuron's packages.
        LoweringError: It did not make a NEFF; see the errors of Neuron there.
    """
    request = make_request(job)
    write_request(request, job.directory)
    _run(job.directory, request)
    answer = read_answer(job.directory)
    if isinstance(answer, Failure):
        raise answer.to_error()
    if answer is None:
        raise LoweringFailed(job.tag, "an interpreter that gave no answer")
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


def _run(directory: Path, request: NeuronRequest) -> None:
    """Runs the interpreter to its end; what it writes goes into the job's log.

    Raises:
        CalledProcessError: It ended by a fault. The log says why, and the pool reads it there.
    """
    assert __package__ is not None
    environment = make_environment(directory) | {
        # Read when Neuron's packages are imported: this host need not have the device.
        "NEURON_PLATFORM_TARGET_OVERRIDE": request.target,
        "NEURON_LOGICAL_NC_CONFIG": str(request.logical_nc_config),
        # Graphs keep the lines that operations come from.
        "XLA_IR_DEBUG": "1",
        "XLA_HLO_DEBUG": "1",
    }
    command = make_command(__package__, str(directory))
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, cwd=directory, check=True)
