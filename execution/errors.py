"""Errors of running executables.

KilnError
└── ExecutionError
    ├── ExecutableInvalid     a blob that cannot be loaded as what the manifest says it is
    ├── ExecutableUnknown     a tag that the bundle does not have
    ├── WeightsInvalid        a weight file that is unreadable or does not fit the manifest
    ├── WeightsNotStaged      a swap with nothing staged
    ├── WeightsAwaited        a step before the first weights of a bundle without any
    ├── SlotUnknown           a slot that the KV cache does not have
    ├── StepInvalid           inputs that do not fit the executable
    ├── StepFailed            an executable that raised while it ran
    │   └── StepAborted       an executable that stopped because another rank or the step before it had failed
    ├── CollectivesMissing    several ranks, but the native library of their collectives has not been built
    ├── TooManyRanks          more ranks than the native library of their collectives serves
    ├── RankFailed            a rank process met an error that is not one of these: our bug
    └── RankLost              a rank that serves no more
        ├── RankDied          a rank process ended by itself
        ├── RankHung          a rank did not answer for too long, and its group was ended
        └── MappedFileChanged a file was written while ranks mapped it, and their group was ended
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

from bundle.errors import FieldViolation, KilnError

# Errors travel in packets and in HTTP/2 headers, and both are short.
_MAX_VIOLATIONS: Final = 16


class ExecutionError(KilnError):
    """Root of the errors of running executables."""

    reason = "EXECUTION_FAILED"


class ExecutableInvalid(ExecutionError):
    """A blob that cannot be loaded as what the manifest says it is.

    `detail` goes to clients, so it has no text of loaders, which names paths and native code. The rank's log has that.
    """

    reason = "EXECUTABLE_INVALID"

    def __init__(self, tag: str, detail: str) -> None:
        super().__init__(f"executable {tag} cannot be loaded: {detail}", tag=tag, detail=detail)


class ExecutableUnknown(ExecutionError):
    """A tag that the bundle does not have."""

    reason = "EXECUTABLE_UNKNOWN"

    def __init__(self, tag: str, known: Sequence[str]) -> None:
        violation = FieldViolation("tag", repr(tag), ", ".join(known))
        super().__init__(
            f"no executable {tag!r} in the bundle; it has {', '.join(known)}", violations=(violation,), tag=tag
        )


class WeightsInvalid(ExecutionError):
    """A weight file that is unreadable or does not fit the manifest; `violations` names the first misfits.

    The message goes to clients, so it names the rank and not the path. The rank's log has the cause.
    """

    reason = "WEIGHTS_INVALID"

    def __init__(self, rank: int, detail: str, violations: Sequence[FieldViolation] = ()) -> None:
        listed = tuple(violations[:_MAX_VIOLATIONS])
        super().__init__(
            f"the weight file of rank {rank} does not fit: {detail}", violations=listed, rank=rank, detail=detail
        )


class WeightsNotStaged(ExecutionError):
    """A swap with nothing staged."""

    reason = "WEIGHTS_NOT_STAGED"

    def __init__(self) -> None:
        super().__init__("no weights are staged: stage them before swapping")


class WeightsAwaited(ExecutionError):
    """A step before the first weights of a bundle without any."""

    reason = "WEIGHTS_AWAITED"

    def __init__(self) -> None:
        super().__init__("the bundle came without weights: stage some and swap them in before the first step")


class SlotUnknown(ExecutionError):
    """A slot that the KV cache does not have."""

    reason = "SLOT_UNKNOWN"

    def __init__(self, slot: int, num_slots: int) -> None:
        violation = FieldViolation("slots", str(slot), f"0 to {num_slots} ({num_slots} is the scratch slot)")
        super().__init__(str(violation), violations=(violation,), slot=slot, num_slots=num_slots)


class StepInvalid(ExecutionError):
    """Inputs that do not fit the executable."""

    reason = "STEP_INVALID"

    def __init__(self, tag: str, violation: FieldViolation) -> None:
        super().__init__(f"step of {tag}: {violation}", violations=(violation,), tag=tag)


class StepFailed(ExecutionError):
    """An executable that raised while it ran. State may be half written.

    `detail` goes to clients, so it holds nothing that the executable raised: that names files and lines of generated
    code. The rank's log has it, as the cause of this error.
    """

    reason = "STEP_FAILED"

    def __init__(self, tag: str, detail: str = "the log of its rank says why") -> None:
        super().__init__(f"step of {tag} failed: {detail}", tag=tag, detail=detail)


class StepAborted(StepFailed):
    """An executable that stopped because another rank or the step before it had failed. State may be half written."""

    reason = "STEP_ABORTED"


class CollectivesMissing(ExecutionError):
    """Several ranks, but the native library of their collectives has not been built."""

    reason = "COLLECTIVES_MISSING"

    def __init__(self, tp_degree: int) -> None:
        super().__init__(
            f"{tp_degree} ranks need the native library of kiln-execution, which has not been built here: "
            "reinstall it where there is a C++ compiler",
            tp_degree=tp_degree,
        )


class TooManyRanks(ExecutionError):
    """More ranks than the native library of their collectives serves."""

    reason = "TOO_MANY_RANKS"

    def __init__(self, tp_degree: int, max_ranks: int) -> None:
        violation = FieldViolation("tp_degree", str(tp_degree), f"1 to {max_ranks}")
        super().__init__(str(violation), violations=(violation,), tp_degree=tp_degree, most_ranks=max_ranks)


class RankFailed(ExecutionError):
    """A rank process met an error that is not one of these: our bug. Its traceback is in the rank's log."""

    reason = "RANK_FAILED"

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(f"rank {rank} failed: {error}, see its log", rank=rank, error=error)


class RankLost(ExecutionError):
    """A rank that serves no more, and so no more than its group.

    Attributes:
        rank: The rank that was lost first.
    """

    reason = "RANK_LOST"
    rank: int


class RankDied(RankLost):
    """A rank process ended by itself.

    Attributes:
        rank: The rank that ended first.
        exit_code: Its exit code; None if a signal ended it.
        signal: Name of the signal that ended it, such as `SIGKILL`; None if it exited.
    """

    reason = "RANK_DIED"

    def __init__(self, rank: int, return_code: int) -> None:
        self.rank = rank
        self.exit_code = return_code if return_code >= 0 else None
        self.signal = signal.Signals(-return_code).name if return_code < 0 else None
        how = self.signal or f"exit code {self.exit_code}"
        super().__init__(f"rank {rank} died: {how}", rank=rank, cause=how)


class RankHung(RankLost):
    """A rank did not answer for too long, and its group was ended.

    Attributes:
        rank: The rank that is stopped, or else the first one that has not answered.
    """

    reason = "RANK_HUNG"

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
    """A file was written while ranks mapped it, and their group was ended.

    Attributes:
        rank: The first of the group.
    """

    reason = "MAPPED_FILE_CHANGED"

    def __init__(self, title: str) -> None:
        self.rank = 0
        super().__init__(f"{title} of the bundle was written while ranks mapped it: they restart", title=title)
