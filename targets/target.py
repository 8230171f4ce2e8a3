"""The types by which a target describes itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from bundle.manifest import StateConvention, TargetKind
from targets.isa import IsaLevels
from targets.toolchain import Toolchain


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutableFormat:
    """One kind of executable file.

    Attributes:
        media_type: OCI media type of a file.
        suffix: Suffix of a file's name in the bundle.
        state_convention: How executables of the format treat their state; see `bundle.manifest.Executable`.
        is_native: Whether a file holds processor instructions, which the host must have; other files run on any host.
        executor: `module:function` that loads an executor; see `execution.executors.executor.LoadExecutor`. None if no
            executor runs the format yet.
        core_variable: Environment variable that tells a rank's process, before it loads anything, which core it may
            take; empty if ranks compute on the host's processors, which the kernel divides among them.
        core_size_variable: Environment variable that says how many physical cores a logical one has; empty likewise.
        core_counter: Module that, run as a program, prints how many logical cores the host has and the kind of
            their target (null if it cannot tell), or an `execution.failure.Failure`, as the last line of its output,
            in JSON; empty likewise.
        meeting_variable: Environment variable that tells the processes of a group, as `host:port`, where their first
            rank listens for the others; empty if they need no such place.
        step_timeouts: How long a step of a device may take, in seconds, by the least length of a bundle's sequences, in
            tokens, ascending from 0; empty: no longer than the runtime says.
        load_timeout_s: How long a rank may stand still while it loads, because it waits for its device; 0 if that is no
            longer than for a step.
        preloaded: Modules that loading the first executable would import, for a process that imports them in advance.
        fixed_code_bytes: Memory of one executable, as plans estimate it, besides `layer_code_bytes` for each layer.
    """

    name: str
    media_type: str
    suffix: str
    state_convention: StateConvention
    is_native: bool
    executor: str | None = None
    core_variable: str = ""
    core_size_variable: str = ""
    core_counter: str = ""
    meeting_variable: str = ""
    step_timeouts: tuple[tuple[int, float], ...] = ()
    load_timeout_s: float = 0.0
    preloaded: tuple[str, ...] = ()
    fixed_code_bytes: int = 0
    layer_code_bytes: int = 0

    def find_step_timeout_s(self, max_length: int) -> float:
        """Returns how many seconds a step may take for sequences of so many tokens; 0 if the format says nothing."""
        return max((seconds for tokens, seconds in self.step_timeouts if tokens <= max_length), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """How the compiler makes a target's executables at one optimization level.

    Attributes:
        backend: `module:function` that makes them; see `compiler_svc.lower.job.LoweringBackend`. None if no backend
            exists yet, so that compiles can only be planned.
        preloaded: Modules that the backend imports only when it needs them, for a process that imports them in advance,
            and functions (`module:function`) that do in advance what the backend does first.
        in_process: Whether the build process calls the backend itself, which it may if the backend neither compiles nor
            runs a graph.
        toolchain: The distributions and programs on which the executables' bytes depend.
    """

    format: ExecutableFormat
    backend: str | None = None
    preloaded: tuple[str, ...] = ()
    in_process: bool = False
    toolchain: Toolchain = field(default_factory=Toolchain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of hardware.

    Attributes:
        tp_degrees: Degrees of tensor parallelism, ascending.
        tp_degrees_note: A remark on the degrees if they do not come from the documents.
        takes_other_degrees: Whether degrees between those listed work too. Plans try only those listed.
        core_bytes: Memory of one physical core; None if all ranks share the host's memory.
        logical_core_sizes: Physical cores that one logical core can have. The first number holds unless a configuration
            says otherwise.
        lowerings: How executables are made at optimization levels 0, 1 and 2.
        max_candidates: The most tokens that executables put in order, because the target's compiler has no sort; None:
            it has one, and they order whole vocabularies.
        returns_internal: Whether executables return the internal outputs of the ABI, for the golden check and for ranks
            that pick tokens of rows with processors. That costs nothing if outputs are in the host's memory anyway; a
            device would have to copy them in every step.
        skips_idle: Whether executables skip what no token needs: rows behind the live ones, and positions of the KV
            cache behind a row's last token. Then one executable serves all buckets that read the cache.
        has_rings: Whether a slot keeps, of a layer with a sliding window, only the positions that steps still see, in a
            ring. Otherwise it keeps all positions of every layer.
        is_checked_on_host: Whether every compiler's host runs the executables, for the golden check. A host that
            compiles for a device need not have one; then XLA stands in for it.
        note: A warning that plans for the target show.
    """

    kind: TargetKind
    tp_degrees: tuple[int, ...]
    tp_degrees_note: str = ""
    takes_other_degrees: bool = False
    core_bytes: int | None
    logical_core_sizes: tuple[int, ...] = (1,)
    isas: IsaLevels = field(default_factory=IsaLevels)
    lowerings: tuple[Lowering, Lowering, Lowering]
    max_candidates: int | None = None
    returns_internal: bool = False
    skips_idle: bool = False
    has_rings: bool = False
    is_checked_on_host: bool = False
    note: str = ""

    @property
    def has_cores(self) -> bool:
        """Whether each rank has a core of the target, with memory of its own; others compute on the host's processors,
        in its memory."""
        return self.core_bytes is not None

    @property
    def logical_core_size(self) -> int:
        """Physical cores of one logical core, unless a configuration says otherwise."""
        return self.logical_core_sizes[0]

    def computes_chunks(self, padding_side: str) -> bool:
        """Whether prompts may be computed in parts: executables for prompts begin behind what the KV cache holds.

        Padding on the left would be between the cached tokens and those of the step.
        """
        return self.skips_idle and padding_side == "right"

    @property
    def is_served(self) -> bool:
        """Whether Kiln makes executables for the target. If not, compiles can only be planned."""
        return all(lowering.backend is not None for lowering in self.lowerings)
