"""Compiles the constraints of requests, and keeps the masks of sequences that have one, in processes of their own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

import msgspec

from bundle.errors import KilnError
from execution.forkserver.client import ForkserverClient
from execution.text.constraint import ConstrainedSequence, Constraint, NextTokens
from execution.text.control import CompileConstraint, Compiled, Follow, Followed, Load
from execution.text.errors import TextLimitExceeded, TextRefused
from execution.text.handle import TextLimits, TextProcess
from runtime_svc.errors import ConstraintFailed, ConstraintLimitExceeded, ConstraintUnspelled
from runtime_svc.text.text_queue import TextQueue

#: Constraints whose first mask is remembered.
MAX_COMPILED: Final = 256
#: Processor time of one constraint. Most take less than a millisecond; 200 alternatives with patterns take 100 of them.
MAX_COMPILE_S: Final = 1.0
#: Processor time of the masks of one step.
_MAX_FOLLOW_S: Final = 2.0
_COMPILING: Final = "compiling the constraint"
_FOLLOWING: Final = "finding the tokens that a constraint allows"


@dataclass(eq=False, slots=True)
class ConstrainedOutput:
    """The output of one sequence with a constraint; `mask` and `forced` as `AllowedTokens` has them.

    Attributes:
        num_sent: Its tokens that the process has, forced ones included.
        has_ended: Whether its sequence has ended, so that it needs no mask.
    """

    constraint: Constraint
    number: int
    mask: bytes | None
    forced: list[int] = field(default_factory=list)
    num_sent: int = 0
    has_ended: bool = False


class ConstraintProcesses:
    """What finds the tokens that the constraints of one deployment's requests allow.

    There are two processes, which start with the first constraint: one compiles what has just come, and is killed if
    that does not end; the other follows sequences, with grammars that the first one has compiled. If it is lost,
    another one gets all tokens of the sequences again.
    """

    def __init__(self, deployment_id: str, load: Load, forkserver: ForkserverClient, limits: TextLimits) -> None:
        self._deployment_id = deployment_id
        self._load = msgspec.structs.replace(load, matches=True)
        self._forkserver = forkserver
        self._limits = limits
        self._compiler = _LateQueue(partial(self._open, min(MAX_COMPILE_S, limits.timeout_s)))
        self._follower = _LateQueue(partial(self._open, min(_MAX_FOLLOW_S, limits.timeout_s)))
        self._compiled = OrderedDict[Constraint, bytes]()
        self._numbers = count()
        self._ended: list[int] = []

    @property
    def num_restarts(self) -> int:
        """How often a process that had ended was replaced."""
        return self._compiler.num_restarts + self._follower.num_restarts

    async def compile(self, constraint: Constraint) -> bytes:
        """Returns the mask of the first token.

        Raises:
            TextRefused: The constraint is malformed, no text matches it, or it cannot be kept exactly.
            TextLimitExceeded: To compile it takes more time or memory than it may.
            TextInvalid: The tokenizer is of a kind that cannot be followed.
        """
        found = self._compiled.get(constraint)
        if found is None:
            # It will be needed soon, and takes a while.
            self._follower.start()
            queue = await self._compiler.get()
            call = CompileConstraint(constraint=constraint)
            found = (await queue.run(constraint.size, call, Compiled, _COMPILING)).mask
            self._compiled[constraint] = found
        self._compiled.move_to_end(constraint)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found

    def begin(self, constraint: Constraint, mask: bytes) -> ConstrainedOutput:
        """Makes the output of a new sequence with a constraint that has been compiled to `mask`."""
        return ConstrainedOutput(constraint, next(self._numbers), mask)

    def end(self, output: ConstrainedOutput) -> None:
        """Takes in that a sequence has ended."""
        output.has_ended = True
        self._ended.append(output.number)

    async def follow(self, outputs: Sequence[tuple[ConstrainedOutput, Sequence[int]]]) -> list[KilnError | None]:
        """Finds the masks of outputs, which come with all tokens of their sequences; returns the error of each.

        A mask stays None without an error if it takes longer than others: then the caller asks again.

        Raises:
            ConstraintLimitExceeded: The masks, or that of one output, take more time or memory than they may.
            ConstraintFailed: The process met an error.
            TextProcessLost: It ended twice.
        """
        # Those that end while they wait would stay in the process, which has heard of their end.
        asked = [(output, tokens) for output, tokens in outputs if not output.has_ended]
        errors = await self._follow(asked) if asked else []
        found = dict(zip((output.number for output, _ in asked), errors, strict=True))
        return [found.get(output.number) for output, _ in outputs]

    async def _follow(self, outputs: Sequence[tuple[ConstrainedOutput, Sequence[int]]]) -> list[KilnError | None]:
        ended, self._ended = self._ended, []
        call = Follow(sequences=[_describe(output, tokens) for output, tokens in outputs], ended=ended)
        try:
            queue = await self._follower.get()
            answer = await queue.run(None, call, Followed, _FOLLOWING)
        except TextLimitExceeded as error:
            raise ConstraintLimitExceeded("constraint", error.limit) from error
        except TextRefused as error:
            # The constraint has compiled, so the client is not at fault. What the process says may quote it.
            raise ConstraintFailed("an error of the process that follows sequences") from error
        errors: list[KilnError | None] = []
        for (output, tokens), found in zip(outputs, answer.sequences, strict=True):
            output.num_sent = 0 if found.state in ("UNKNOWN", "BUILDING") else len(tokens) + len(found.forced)
            output.mask = found.mask if found.state == "KNOWN" else None
            output.forced = found.forced
            errors.append(_make_error(found))
        return errors

    async def close(self) -> None:
        """Ends the processes. Calling it again is harmless."""
        await asyncio.gather(self._compiler.close(), self._follower.close())

    async def _open(self, timeout_s: float) -> TextQueue:
        start = partial(TextProcess.start, self._load, self._forkserver, replace(self._limits, timeout_s=timeout_s))
        return TextQueue(self._deployment_id, await start(), start)


class _LateQueue:
    """A queue whose process starts when it is asked for first; a start that failed is tried again."""

    def __init__(self, open_: Callable[[], Awaitable[TextQueue]]) -> None:
        self._open = open_
        self._opening: asyncio.Future[None] | None = None
        self._queue: TextQueue | None = None

    @property
    def num_restarts(self) -> int:
        return 0 if self._queue is None else self._queue.num_restarts

    def start(self) -> asyncio.Future[None]:
        if self._opening is None or (self._queue is None and self._opening.done()):
            self._opening = asyncio.ensure_future(self._start())
            # Marks an error as retrieved: the next caller begins anew.
            self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._opening

    async def get(self) -> TextQueue:
        await asyncio.shield(self.start())
        assert self._queue is not None, "it has started"
        return self._queue

    async def close(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._queue is not None:
            await self._queue.close()

    async def _start(self) -> None:
        self._queue = await self._open()


def _make_error(found: NextTokens) -> KilnError | None:
    match found.state:
        case "FAILED":
            return ConstraintLimitExceeded("constraint", found.detail)
        case "UNSPELLED":
            return ConstraintUnspelled("constraint", repr(found.detail) if found.detail else "several characters")
    return None


def _describe(output: ConstrainedOutput, tokens: Sequence[int]) -> ConstrainedSequence:
    start = output.num_sent
    return ConstrainedSequence(output.number, start, list(tokens[start:]), None if start else output.constraint)
