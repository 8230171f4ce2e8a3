"""The masks of requests whose output is constrained: asked for with each new token, and there before the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from bundle.errors import KilnError
from edge.supervision import begin_task
from runtime_svc.engine.request import Finish, FinishReason, Request
from runtime_svc.engine.scheduler.plan import RowTokens
from runtime_svc.errors import ConstraintFailed

#: Allowed tokens, with all tokens of their sequences -> for each the error that ends it; None if the mask has been
#: found, or is to be asked for again. It raises
#: what makes the whole call fail.
Follow = Callable[[Sequence[tuple[Any, Sequence[int]]]], Awaitable[list[KilnError | None]]]

#: How long a step waits for masks, or its tokens behind it. Requests whose masks take longer miss it, so that they hold
#: up no others.
PATIENCE_S: Final = 0.003
#: So many masks are there before a step could be called, and with them the tokens that are forced, which save steps.
#: More are found while the step runs.
_FEW: Final = 4
#: When masks that took longer are asked for again.
_RETRY_S: Final = 0.005


class ConstrainedRequests:
    """Keeps the masks of running requests; those whose mask is missing stand still."""

    def __init__(self, *, wake: Callable[[], None], end: Callable[[Request, Finish], object], picks_late: bool) -> None:
        """Calls `wake` when masks have come, and `end` for a sequence whose masks cannot be found.

        `picks_late` tells whether a step may leave rows whose masks have not come.
        """
        #: Finds masks, and hears of outputs that have ended. A deployment that serves constraints sets both.
        self.follow: Follow | None = None
        self.on_end: Callable[[Any], None] = lambda _: None
        self._wake = wake
        self._end = end
        self._picks_late = picks_late
        #: Those that have not ended.
        self.running: set[Request] = set()
        self._asking: set[asyncio.Task[None]] = set()

    def note_tokens(self, rows: Sequence[RowTokens]) -> None:
        """Takes in what a step gave to requests: those that go on need other masks, unless the tokens were forced."""
        following: list[Request] = []
        for new in rows:
            constrained = new.request.constrained
            if constrained is None or new.request.finish is not None:
                continue
            if constrained.forced:
                del constrained.forced[: len(new.token_ids)]
            else:
                constrained.mask = None
                new.request.is_awaited = self._picks_late
                following.append(new.request)
        if following:
            self._ask(following)

    def forget(self, request: Request) -> None:
        """Takes in that a request has ended."""
        if request.constrained is not None:
            self.running.discard(request)
            self.on_end(request.constrained)

    async def wait(self) -> None:
        """Waits before a step for masks that were asked for, but not for long, nor if the step can leave many rows."""
        if not self._picks_late or sum(one.lacks_mask for one in self.running) <= _FEW:
            await self._wait()

    async def wait_behind(self, rows: Sequence[Request], step: asyncio.Future[Any]) -> None:
        """Waits for the masks of rows that a step leaves, until it has ended and a little longer.

        No step awaits masks that come later.
        """
        while self._asking and not step.done() and any(one.lacks_mask for one in rows):
            await asyncio.wait((*self._asking, step), return_when=asyncio.FIRST_COMPLETED)
        if any(one.lacks_mask for one in rows):
            await self._wait()
        for one in rows:
            one.is_awaited = False

    async def _wait(self) -> None:
        if self._asking:
            await asyncio.wait(self._asking, timeout=PATIENCE_S)

    def _ask(self, requests: Sequence[Request]) -> None:
        begin_task(self._find(requests), self._asking)

    async def _find(self, requests: Sequence[Request]) -> None:
        try:
            found = await self._follow(requests)
        except KilnError as error:
            self._fail(requests, error)
        except Exception as error:
            self._fail(requests, ConstraintFailed(type(error).__name__))
            raise
        else:
            self._take(requests, found)

    async def _follow(self, requests: Sequence[Request]) -> list[KilnError | None]:
        assert self.follow is not None, "constraints are served"
        found = await self.follow([(one.constrained, one.output_token_ids) for one in requests])
        assert len(found) == len(requests), "there is an answer for each"
        return found

    def _fail(self, requests: Sequence[Request], error: KilnError) -> None:
        """Ends the request of a call that failed; asks for each mask alone if the call was for several."""
        if len(requests) == 1:
            self._end(requests[0], Finish(FinishReason.ERROR, error=error))
            return
        for request in requests:
            self._ask([request])

    def _take(self, requests: Sequence[Request], errors: Sequence[KilnError | None]) -> None:
        late = []
        for request, error in zip(requests, errors, strict=True):
            if request.finish is not None or request.constrained is None:
                continue
            if error is not None:
                self._end(request, Finish(FinishReason.ERROR, error=error))
            elif request.constrained.mask is None:
                late.append(request)
        if late:
            asyncio.get_running_loop().call_later(_RETRY_S, self._ask, late)
        self._wake()
