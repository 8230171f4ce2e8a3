"""The job of a lowering process and its outcome, as files in the job's directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from bundle.abi.neff import NeffProgram
from bundle.manifest import FormatName, StateConvention, Target
from execution.failure import Failure
from targets.registry import TARGETS
from targets.target import Lowering

#: What `prebuilt` made when the distribution was installed, named as in `LoweringJob.cache_dir`; may be missing.
PREBUILT: Final = Path(__file__).with_name("prebuilt_files")

_JOB_FILE: Final = "job.json"
_EXECUTABLE_FILE: Final = "executable.json"
_FAILURE_FILE: Final = "failure.json"

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class LoweringOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a lowering. All of them belong in cache keys."""

    #: 0: keep the graph. 1: compile it. 2: also let the compiler fuse multiplications into additions.
    optimization_level: Literal[0, 1, 2]
    #: Its instruction set comes from `IsaLevels.resolve`.
    target: Target

    @property
    def lowering(self) -> Lowering:
        """The target's lowering for the level."""
        return TARGETS[self.target.kind].lowerings[self.optimization_level]


class LiveInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a program that say which of its rows of tokens are live, by their places among its inputs."""

    #: int32 [1]: how many rows are live; the first ones.
    rows: int
    #: int32 [R, T]: the tokens.
    tokens: int
    #: int32 [R]: how many of a row's tokens are live; the first ones. None: any may be.
    counts: int | None = None


class NeuronSubmodel(msgspec.Struct, frozen=True, kw_only=True):
    """A submodel for another interpreter, which cannot read the staged program: its torch is older.

    Attributes:
        make_module: `module:function` that makes the submodel of the document, in the other interpreter.
        document: The submodel as JSON.
        flags: Arguments of neuronx-cc.
        logical_nc_config: Physical cores of one logical core.
        tp_degree: Number of ranks.
    """

    make_module: str
    document: dict[str, Any]
    flags: tuple[str, ...]
    logical_nc_config: int
    tp_degree: int


class LoweringJob(msgspec.Struct, frozen=True, kw_only=True):
    """One lowering: a staged program and its options."""

    tag: str
    #: Holds this job's files: the program, the log, and files of the compiler.
    directory: Path
    #: Shared by all jobs and kept: precompiled headers, some 300 MB for each set of flags, and common objects.
    cache_dir: Path
    #: Number of the program's last inputs and outputs that are state.
    num_state: int
    #: Parameters and buffers of the program, by name.
    constants: tuple[str, ...]
    #: Address space of constants, inputs and state; a lowering reserves each of them once and touches none.
    reserved_bytes: int
    options: LoweringOptions
    #: What the program may skip; None: nothing is known.
    live: LiveInputs | None = None
    #: Whether the program exchanges tensors with other ranks.
    has_collectives: bool = False
    #: The same for Neuron targets, whose lowering takes this instead of the program.
    neuron: NeuronSubmodel | None = None

    @property
    def program_path(self) -> Path:
        """The program, without weights; see `program`."""
        return self.directory / "program.pt2"

    @property
    def log_path(self) -> Path:
        """Standard error of the lowering process."""
        return self.directory / "log.txt"


class LoweredExecutable(msgspec.Struct, frozen=True, kw_only=True):
    """An executable, ready to be put into a bundle; fields as in `bundle.manifest.Executable`."""

    tag: str
    path: Path
    format: FormatName
    state_convention: StateConvention
    #: Names of the constants that the executable needs; a subset of the job's.
    constants: tuple[str, ...]
    #: How to call the executable, if it is a NEFF.
    neff: NeffProgram | None = None
    #: Files that describe the executable for people and tools, by what they are.
    companions: dict[str, Path] = {}


#: Makes an executable from a staged program; each target names its backends. Raises ProgramUnsupported if it cannot
#: lower the program, and ToolchainMissing if a compiler is missing.
LoweringBackend = Callable[[LoweringJob], LoweredExecutable]


def write_job(job: LoweringJob) -> None:
    """Writes the job where `read_job` finds it."""
    _write(job.directory / _JOB_FILE, job)


def read_job(directory: Path) -> LoweringJob:
    """Reads the job in a directory."""
    return _read(directory / _JOB_FILE, LoweringJob)


def write_outcome(job: LoweringJob, outcome: LoweredExecutable | Failure) -> None:
    """Writes the outcome where `read_outcome` finds it."""
    _write(job.directory / (_FAILURE_FILE if isinstance(outcome, Failure) else _EXECUTABLE_FILE), outcome)


def read_outcome(job: LoweringJob) -> LoweredExecutable | Failure | None:
    """Reads a job's outcome; None if its process ended without writing one."""
    if (path := job.directory / _FAILURE_FILE).exists():
        return _read(path, Failure)
    if (path := job.directory / _EXECUTABLE_FILE).exists():
        return _read(path, LoweredExecutable)
    return None


def _write(path: Path, record: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.encode(record, enc_hook=str))


def _read(path: Path, record_type: type[RecordT]) -> RecordT:
    return msgspec.json.decode(path.read_bytes(), type=record_type, dec_hook=lambda path_type, text: path_type(text))
