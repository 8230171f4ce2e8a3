"""Every request that has not ended, from submission to the terminal event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bundle.abi.inputs import LEFT_PADDED
from bundle.errors import KilnError
from runtime_svc.engine.config import EngineConfig
from runtime_svc.engine.constraints import ConstrainedRequests
from runtime_svc.engine.output_text import OutputText
from runtime_svc.engine.pauses import PausedRequests
from runtime_svc.engine.prompt_reports import ReportedRow
from runtime_svc.engine.request import Finish, FinishReason, Request, StallAction
from runtime_svc.engine.scheduler.plan import RowTokens, StepPlan
from runtime_svc.engine.scheduler.scheduler import Scheduler
from runtime_svc.engine.sessions import SessionTable
from runtime_svc.engine.streams import MergedStream, OutputStream, SequencePublisher, StepOutcome, StepOutput
from runtime_svc.engine.suspects import SuspectPrompts
from runtime_svc.errors import (
    AdapterUnwritable,
    DeadlineExceeded,
    NumericsInvalid,
    PromptQuarantined,
    QueueFull,
    RequestAborted,
    RequestIdInUse,
)

#: Output texts, each with its new tokens -> for each the error that ends its request; None if the text is made.
DecodeStep = Callable[[Sequence[tuple[Any, Sequence[int]]]], Awaitable[list[KilnError | None]]]

# Weight of the newest observation in the mean time that a request runs.
SMOOTHING: Final = 0.2
MIN_RETRY_S: Final = 0.1
#: Ends that a request comes to by itself.
_GOOD_ENDS: Final = frozenset({FinishReason.STOP_TOKEN, FinishReason.STOP_STRING, FinishReason.LENGTH})


@dataclass(eq=False, slots=True)
class _Call:
    """The sequences of one call, by index; `num_left` of them have not ended."""

    requests: Sequence[Request]
    num_left: int
    deadline: asyncio.TimerHandle | None = None


class RequestTable:
    """Calls by owner and id, with the streams of their sequences and their deadlines.

    A sequence ends by its own tokens, text or numbers; all other causes end its call, all sequences at once. The first
    cause that ends a request wins: `Request.claim_finish` decides, and only the winner writes the terminal event.
    """

    def __init__(
        self, scheduler: Scheduler, config: EngineConfig, *, wake: Callable[[], None], picks_late: bool = False
    ) -> None:
        """Starts empty; calls `wake` when there may be something to schedule.

        `picks_late` tells whether ranks can pick tokens behind a step.
        """
        self._scheduler = scheduler
        self._stream_capacity = config.stream_capacity
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._calls: dict[tuple[str, str], _Call] = {}
        # Of sequences that have not ended.
        self._publishers: dict[Request, SequencePublisher] = {}
        self._unpublished: list[StepOutput] = []
        self._tainted_blocks: set[int] = set()
        #: What requests continue.
        self.sessions = SessionTable(scheduler.kv, config.session_limits, now=self._loop.time)
        #: Those whose output must match something.
        self.constraints = ConstrainedRequests(wake=wake, end=self.end_sequence, picks_late=picks_late)
        #: The prompts that may have cost ranks.
        self.suspects = SuspectPrompts()
        self._became_empty = asyncio.Event()
        self._became_empty.set()
        self._pauses = PausedRequests(config.stall_timeouts.default_s, is_contended=self._is_contended, end=self.end)
        # Callers of `wait_until_empty`.
        self._num_waiting_for_all = 0
        self._mean_running_s = 0.0
        self.queue_capacity = config.queue_capacity
        #: Makes the text of a step's tokens, for sequences that cannot make it themselves; None if they can.
        self.decode_step: DecodeStep | None = None
        #: Requests that capture inputs.
        self.num_captures = 0

    def __len__(self) -> int:
        return len(self._publishers)

    def submit(
        self, requests: Sequence[Request], texts: Sequence[OutputText], *, deadline_s: float | None
    ) -> OutputStream | MergedStream:
        """Queues the sequences of a call, all or none; they are admitted, with nothing computed, see `Request.fan_out`.

        The call ends at `deadline_s` by the event loop's clock; None for never.
        """
        first = requests[0]
        if first.call_id in self._calls:
            raise RequestIdInUse(first.request_id)
        scheduler = self._scheduler
        num_free = scheduler.max_running - scheduler.num_running
        if len(scheduler.waiting) + len(requests) > self.queue_capacity + num_free:
            raise QueueFull(self.queue_capacity, max(MIN_RETRY_S, self._mean_running_s / scheduler.max_running))
        if self.suspects.entries:
            for request in requests:
                self._admit(request)
        if first.session is not None:
            first.session = self.sessions.join(first.session, first)
        call = self._calls[first.call_id] = _Call(requests, num_left=len(requests))
        self._became_empty.clear()
        if deadline_s is not None:
            call.deadline = self._loop.call_at(deadline_s, self._expire, first)
        streams = [self._add(request, text) for request, text in zip(requests, texts, strict=True)]
        self._publishers[first].accept()
        self._wake()
        return streams[0] if len(streams) == 1 else MergedStream(streams)

    def _add(self, request: Request, text: OutputText) -> OutputStream:
        stream = OutputStream(
            self._stream_capacity,
            on_drained=lambda: self._resume(request),
            on_closed=lambda: self._abandon(request),
            counts_values=request.stall is not None and request.stall.action is StallAction.COALESCE,
            stall_timeout_s=None if request.stall is None else request.stall.timeout_s,
        )
        self._publishers[request] = SequencePublisher(request, text, stream)
        self.num_captures += request.capture is not None
        if request.constrained is not None:
            # What comes next depends on it.
            request.needs_newest_token = True
            self.constraints.running.add(request)
        self._scheduler.add(request)
        return stream

    def abort(self, request_id: str, cause: str, *, owner: str = "", reaches_all: bool = False) -> bool:
        """Ends an owner's call for `cause`; False if it has ended already, or never was.

        With `reaches_all`, if the owner has no call with this id, ends those of all others that have one.
        """
        found = [self._calls[owner, request_id]] if (owner, request_id) in self._calls else []
        if not found and reaches_all:
            found = [call for call_id, call in self._calls.items() if call_id[1] == request_id]
        return sum([self.end(call.requests[0], aborted(call.requests[0], cause)) for call in found]) > 0

    def end(self, request: Request, finish: Finish) -> int:
        """Ends the sequences of a request's call, frees their parts of the KV cache, and returns how many it ended."""
        # The id may be that of a later call by now.
        call = self._calls.get(request.call_id)
        if call is None or request not in call.requests:
            return 0
        return sum([self.end_sequence(one, finish) for one in call.requests])

    def end_sequence(self, request: Request, finish: Finish) -> bool:
        """Ends one sequence unless it has ended; returns whether this call did."""
        self.publish()
        if not request.claim_finish(finish, self._loop.time()):
            return False
        self._scheduler.remove(request)
        self._conclude(request, finish)
        return True

    def end_invalid(self, plan: StepPlan, invalid_rows: Collection[int]) -> None:
        """Ends the requests of rows that the executable calls invalid, and remembers their blocks of the KV cache."""
        for row in plan.rows:
            if row.row in invalid_rows:
                # What it wrote: blocks before these may be others', too, and hold valid numbers.
                first = row.num_cached // self._scheduler.kv.block_tokens
                self._tainted_blocks.update(row.placement.blocks[first:])
                error = NumericsInvalid(row.request.request_id, row.request.num_tokens)
                if self.end_sequence(row.request, Finish(FinishReason.ERROR, error=error)):
                    self._scheduler.statistics.invalid_requests += 1

    async def decode(self, new: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Has the text of new tokens made before `add_output` gets them; ends requests for which that fails."""
        new = [(request, tokens) for request, tokens in new if request in self._publishers]
        if self.decode_step is None or not new:
            return
        errors = await self.decode_step([(self._publishers[request].text, tokens) for request, tokens in new])
        for (request, _), error in zip(new, errors, strict=True):
            if error is not None:
                self.end_sequence(request, Finish(FinishReason.ERROR, error=error))

    async def jump(self) -> None:
        """Gives requests the tokens that their constraints force, where that is cheaper; no step is in flight."""
        jumps = self._scheduler.list_jumps()
        if not jumps:
            return
        # Stop strings end requests, and texts take the tokens that they have, before others follow.
        self.publish()
        await self.decode(jumps)
        now_s = self._loop.time()
        rows = [self._scheduler.jump(one, known, now_s) for one, known in jumps if one.finish is None]
        self.add_output(StepOutput(rows, StepOutcome(())))

    def note_loss(self, requests: Collection[Request]) -> None:
        """Takes in that ranks were lost over these requests; ends waiting ones whose prompts are quarantined now."""
        self.suspects.note_loss(requests, self._loop.time())
        for request in tuple(self._scheduler.waiting):
            # The loss ends those whose call runs, and the end of one ends those behind it.
            if request.finish is not None or self._runs(self._calls[request.call_id]):
                continue
            try:
                self._admit(request)
            except PromptQuarantined as error:
                self.end(request, Finish(FinishReason.ERROR, error=error))

    def take_tainted_blocks(self) -> list[int]:
        """Returns the blocks that may hold NaN since the last call; attention weighs it by 0, which is NaN again."""
        tainted, self._tainted_blocks = sorted(self._tainted_blocks), set()
        return tainted

    def end_all(self, finish_of: Callable[[Request], Finish]) -> int:
        """Ends every call; returns how many sequences this ended."""
        requests = [call.requests[0] for call in self._calls.values()]
        return sum(self.end(request, finish_of(request)) for request in requests)

    def end_adapter(self, digest: str, cause: str) -> None:
        """Ends the calls of an adapter that the ranks cannot take."""
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            if request.adapter is not None and request.adapter.digest == digest:
                self.end(request, Finish(FinishReason.ERROR, error=AdapterUnwritable(request.adapter.name, cause)))

    def take_reported(self, plan: StepPlan, outputs: Mapping[str, memoryview[Any]]) -> None:
        """Takes what a step says of prompts, for the requests that tell it."""
        is_left_padded = LEFT_PADDED in plan.executable.flags
        for row in plan.rows if outputs else ():
            if row.request.lacks_report and row.request.report is not None:
                first = row.num_moved + (plan.executable.num_row_tokens - row.num_tokens if is_left_padded else 0)
                count = row.num_tokens - row.num_moved
                row.request.report.take(ReportedRow(row.row, row.num_cached, count, first, outputs))

    def add_output(self, output: StepOutput) -> None:
        """Takes the new tokens of a step; `publish` writes them."""
        if output.rows:
            self._unpublished.append(output)

    def publish(self) -> None:
        """Writes the tokens of the steps since the last call, and ends sequences whose text has met a stop string."""
        outputs, self._unpublished = self._unpublished, []
        for output in outputs:
            for new in output.rows:
                self._publish(new, output)

    async def wait_until_empty(self) -> None:
        """Returns when no request is left."""
        self._num_waiting_for_all += 1
        try:
            await self._became_empty.wait()
        finally:
            self._num_waiting_for_all -= 1

    def _runs(self, call: _Call) -> bool:
        return any(one.finish is None and one.timeline.started_s is not None for one in call.requests)

    def _admit(self, request: Request) -> None:
        try:
            self.suspects.admit(request, self._loop.time())
        except PromptQuarantined:
            self._scheduler.statistics.quarantined_requests += 1
            raise

    def _publish(self, new: RowTokens, output: StepOutput) -> None:
        request = new.request
        publisher = self._publishers[request]
        finish = request.finish
        stop_string = publisher.publish(new, output.outcome)
        if stop_string is not None:
            finish = Finish(FinishReason.STOP_STRING, stop_string=stop_string)
            if request.claim_finish(finish, self._loop.time()):
                self._scheduler.remove(request)
        if finish is not None:
            self._conclude(request, finish)
        elif publisher.stream.is_full:
            self._pauses.pause(request, publisher.stream)

    def _conclude(self, request: Request, finish: Finish) -> None:
        self._publishers.pop(request).finish(finish)
        statistics, timeline = self._scheduler.statistics, request.timeline
        assert timeline.ended_s is not None
        statistics.finished[finish.reason] += 1
        statistics.request_s.observe(timeline.ended_s - timeline.arrived_s)
        self.num_captures -= request.capture is not None
        if request.constrained is not None:
            self.constraints.forget(request)
        if self.suspects.entries and finish.reason in _GOOD_ENDS:
            self.suspects.forget(request)
        if request.is_paused:
            self._pauses.resume(request)
        call = self._calls[request.call_id]
        call.num_left -= 1
        if not call.num_left:
            del self._calls[request.call_id]
            if call.deadline is not None:
                call.deadline.cancel()
        if timeline.started_s is not None:
            running_s = timeline.ended_s - timeline.started_s
            self._mean_running_s += SMOOTHING * (running_s - self._mean_running_s)
        if not self._publishers:
            self._became_empty.set()
        self._wake()

    def _resume(self, request: Request) -> None:
        if request.is_paused:
            self._pauses.resume(request)
            self._wake()

    def _is_contended(self, request: Request) -> bool:
        """Whether other calls wait for room in the KV cache or an adapter's slot, or operations or an unload for it."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        lacks_room = False
        next_ = next((one for one in scheduler.waiting if one.call_id != request.call_id), None)
        if next_ is not None:
            # A request that has just come waits for a moment, also if there is room.
            num_free_tokens = (kv.num_blocks - kv.num_used_blocks) * kv.block_tokens
            is_full = scheduler.num_running >= scheduler.max_running
            lacks_room = is_full or next_.num_tokens > num_free_tokens
        if request.adapter is not None:
            lacks_room |= any(scheduler.adapters.lacks_slot(one) for one in scheduler.waiting)
        return lacks_room or not scheduler.is_admitting or bool(self._num_waiting_for_all)

    def _abandon(self, request: Request) -> None:
        if request.finish is None:
            self.end(request, aborted(request, "its client"))

    def _expire(self, request: Request) -> None:
        self.end(request, Finish(FinishReason.TIME, error=DeadlineExceeded(request.request_id)))


def aborted(request: Request, cause: str) -> Finish:
    """Returns the finish of an aborted request; `cause` names who ended it, such as the call."""
    return Finish(FinishReason.ABORTED, error=RequestAborted(request.request_id, cause))
