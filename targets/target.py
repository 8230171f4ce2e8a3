"""What a target states of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from bundle.manifest import StateConvention, TargetKind
from targets.isa import IsaLevels
from targets.toolchain import Toolchain


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutableFormat:
    """One kind of executable file.

    Attributes:
        name: As manifests say it.
        media_type: OCI media type of a file.
        suffix: Of a file's name in the bundle.
        state_convention: How executables of the format treat their state; see `bundle.manifest.Executable`.
        is_native: Whether a file holds instructions, which the host must have; otherwise it runs on any host.
        executor: `module:function` of what loads an executor; see `execution.executors.executor.LoadExecutor`. None if
            nothing runs the format yet.
        preloaded: Modules that loading the first executable would import, for a process that loads them in advance.
        fixed_code_bytes: Memory of one executable, beside that of its layers, as plans estimate it.
        layer_code_bytes: Memory of one executable for each layer of the model, as plans estimate it.
    """

    name: str
    media_type: str
    suffix: str
    state_convention: StateConvention
    is_native: bool
    executor: str | None = None
    preloaded: tuple[str, ...] = ()
    fixed_code_bytes: int = 0
    layer_code_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """How a target's executables are made at one optimization level.

    Attributes:
        format: What is made.
        backend: `module:function` of what makes it; see `compiler_svc.lower.job.LoweringBackend`. None if nothing makes
            it yet, so that compiles are planned only.
        in_process: Whether the build process calls the backend itself: it neither compiles nor runs a graph.
        toolchain: What the executables' bytes depend on.
    """

    format: ExecutableFormat
    backend: str | None = None
    in_process: bool = False
    toolchain: Toolchain = field(default_factory=Toolchain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of hardware.

    Attributes:
        kind: As manifests and configurations say it.
        tp_degrees: Degrees of tensor parallelism, ascending.
        tp_degrees_note: What to say of the degrees if they are not from the documents.
        takes_other_degrees: Whether degrees between those listed work, too. Plans try those listed.
        core_bytes: Memory of one physical core; None if all ranks share the host's memory.
        logical_core_size: Physical cores of one logical core, unless a configuration says otherwise.
        isas: Instruction sets to choose from.
        lowerings: How executables are made at optimization levels 0, 1 and 2.
        note: What a plan for the target should warn of.
    """

    kind: TargetKind
    tp_degrees: tuple[int, ...]
    tp_degrees_note: str = ""
    takes_other_degrees: bool = False
    core_bytes: int | None
    logical_core_size: int = 1
    isas: IsaLevels = field(default_factory=IsaLevels)
    lowerings: tuple[Lowering, Lowering, Lowering]
    note: str = ""

    @property
    def is_served(self) -> bool:
        """Whether executables are made for the target; otherwise compiles are planned only."""
        return all(lowering.backend is not None for lowering in self.lowerings)
