"""The job of a lowering process, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from bundle.abi.neff import NeffProgram
from bundle.manifest import FormatName, StateConvention, Target
from targets.registry import TARGETS
from targets.target import Lowering

#: What `prebuilt` made when the distribution was installed, named as in `LoweringJob.cache_dir`; may be missing.
PREBUILT: Final = Path(__file__).with_name("prebuilt_files")


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


class PickedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Where a program says for which rows it need not pick a token."""

    #: Place among the inputs: f32 [R, N], of which the first number is negative in such rows.
    sampling_params: int
    #: Place among the outputs: int32 [R].
    tokens: int


class LiveInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a program that say which of its rows of tokens are live, by their places among its inputs."""

    #: int32 [1]: how many rows are live; the first ones.
    rows: int
    #: int32 [R, T]: the tokens.
    tokens: int
    #: int32 [R]: how many of a row's tokens are live; the first ones. None: any may be.
    counts: int | None = None
    #: None: it picks a token for each live row, if any.
    picked: PickedTokens | None = None


class NeuronSubmodel(msgspec.Struct, frozen=True, kw_only=True):
    """A submodel for another interpreter, which cannot read the staged program: its torch is older.

    Attributes:
        make_module: `module:function` that makes the submodel of the document, in the other interpreter.
        logical_nc_config: Physical cores of one logical core.
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
