"""Errors of running executables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bundle.errors import FieldViolation, KilnError, Unsaid
from execution.failure import name_cause

# Errors travel in packets and in HTTP/2 headers, and both are short.
_MAX_VIOLATIONS: Final = 16


class ExecutionError(KilnError, reason="EXECUTION_FAILED"):
    """Root of the errors of running executables. It has no code, so that each of them states its own."""


class ExecutableInvalid(ExecutionError, code="FAILED_PRECONDITION"):
    """A blob that cannot be loaded as what the manifest says it is.

    `detail` goes to clients, so it has no text of loaders, which names paths and native code. The rank's log has that.
    """

    message = "executable {tag} cannot be loaded: {detail}"
    tag: str
    detail: str


class ExecutableUnknown(ExecutionError, code="INTERNAL"):
    """A tag that the bundle does not have."""

    message = "no executable {tag!r} in the bundle; it has {known}"
    violation = FieldViolation("tag", "{tag!r}", "{known}")
    tag: str
    known: Unsaid[Sequence[str]]


class WeightsInvalid(ExecutionError, code="FAILED_PRECONDITION"):
    """A weight file that is unreadable or does not fit the manifest; `violations` names the first misfits.

    The message goes to clients, so it names the rank and not the path. The rank's log has the cause.
    """

    def __init__(self, rank: int, detail: str, violations: Sequence[FieldViolation] = ()) -> None:
        listed = tuple(violations[:_MAX_VIOLATIONS])
        super().__init__(
            f"the weight file of rank {rank} does not fit: {detail}", violations=listed, rank=rank, detail=detail
        )


class WeightsNotStaged(ExecutionError, code="INTERNAL"):
    """A swap with nothing staged."""

    message = "no weights are staged: stage them before swapping"


class WeightsAwaited(ExecutionError, code="INTERNAL"):
    """A step before the first weights of a bundle without any."""

    message = "the bundle came without weights: stage some and swap them in before the first step"


class WeightSetNotMutable(ExecutionError, code="INTERNAL"):
    """A write to a weight set that the bundle does not have, or that executors map from files."""

    violation = FieldViolation("weight_set", "{weight_set!r}", "mutable sets of the bundle: {mutable}")
    weight_set: str
    mutable: Unsaid[Sequence[str]]


class EntryUnknown(ExecutionError, code="INTERNAL"):
    """A write to an entry that the tensors of a mutable weight set do not have."""

    violation = FieldViolation("weight_sets[{weight_set}].index", "{index}", "0 to {last_index}")
    weight_set: str
    index: int
    last_index: int


class SlotUnknown(ExecutionError, code="INTERNAL"):
    """A slot that the KV cache does not have."""

    violation = FieldViolation("slots", "{slot}", "0 to {last_slot}")
    slot: int
    last_slot: int


class StepInvalid(ExecutionError, code="INTERNAL"):
    """Inputs that do not fit the executable."""

    def __init__(self, tag: str, violation: FieldViolation) -> None:
        super().__init__(f"step of {tag}: {violation}", violations=(violation,), tag=tag)


class StepFailed(ExecutionError, code="INTERNAL"):
    """An executable that raised while it ran. State may be half written.

    `detail` goes to clients, so it holds nothing that the executable raised: that names files and lines of generated
    code. The rank's log has it, as the cause of this error.
    """

    message = "step of {tag} failed: {detail}"
    tag: str
    detail: str = "the log of its rank says why"


class StepAborted(StepFailed):
    """An executable that stopped because another rank or the step before it had failed. State may be half written."""


class CollectivesMissing(ExecutionError, code="FAILED_PRECONDITION"):
    """Several ranks, but the native library of their collectives has not been built."""

    message = (
        "{tp_degree} ranks need the native library of kiln-execution, which has not been built here: reinstall it "
        "where there is a C++ compiler"
    )
    tp_degree: int


class TooManyRanks(ExecutionError, code="FAILED_PRECONDITION"):
    """More ranks than the native library of their collectives serves."""

    violation = FieldViolation("tp_degree", "{tp_degree}", "1 to {most_ranks}")
    tp_degree: int
    most_ranks: int


class RankFailed(ExecutionError, code="INTERNAL"):
    """A rank process met an error that is not one of these: our bug. Its traceback is in the rank's log."""

    message = "rank {rank} failed: {error}, see its log"
    rank: int
    error: str


class RankLost(ExecutionError, code="UNAVAILABLE"):
    """A rank that serves no more, and so no more than its group.

    Attributes:
        rank: The rank that was lost first; 0 until the handle of its group sets it.
    """

    rank = 0


class RankDied(RankLost):
    """A rank process ended by itself.

    Attributes:
        rank: The rank that ended first.
        cause: The signal that ended it, such as `SIGKILL`, or its exit code.
    """

    def __init__(self, rank: int, exit_code: int) -> None:
        self.rank, self.cause = rank, name_cause(exit_code)
        super().__init__(f"rank {rank} died: {self.cause}", rank=rank, cause=self.cause)


class RankHung(RankLost):
    """A rank did not answer for too long, and its group was ended.

    Attributes:
        rank: The rank that is stopped, or else the first one that has not answered.
    """

    def __init__(self, rank: int, call: str, waited_s: float, how: str) -> None:
        self.rank = rank
        super().__init__(
            f"rank {rank} hung: {call} has not ended within {waited_s:g} s, and the rank {how}",
            rank=rank,
            call=call,
            waited_s=f"{waited_s:g}",
            how=how,
        )


class MappedFileChanged(RankLost):
    """A file was written while ranks mapped it, and their group was ended."""

    message = "{title} of the bundle was written while ranks mapped it: they restart"
    title: str
