"""The plan of one step."""

from __future__ import annotations

import msgspec

from bundle.manifest import Executable
from runtime_svc.engine.capture import CapturedRow
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request


class ScheduledRow(msgspec.Struct, frozen=True):
    """One request's part of a step.

    Attributes:
        row: Row of the executable's batch.
        request: The request that the tokens belong to.
        start: Position of the first token that the step computes; the KV cache holds those before it.
        num_tokens: Tokens that it computes, from `start` on.
        placement: Where the KV cache holds the request, these tokens included.
        samples: Whether new tokens come out: the newest token of the request is among those that the step computes.
        num_moved: Of the tokens that it computes, the first ones that the KV cache holds already. Blocks that others
            share hold them, so they are not written again.
    """

    row: int
    request: Request
    start: int
    num_tokens: int
    placement: Placement
    samples: bool
    num_moved: int = 0

    @property
    def num_cached(self) -> int:
        """Tokens of the request that the KV cache holds before the step."""
        return self.start + self.num_moved


class StepPlan(msgspec.Struct, frozen=True):
    """One call of one executable; rows that are not listed idle.

    Attributes:
        executable: The executable to call.
        rows: The requests that it computes, one a row.
        depends_on_previous: The step was planned while the previous one runs, and computes tokens that only the ranks
            know so far: those that the previous step gives.
    """

    executable: Executable
    rows: tuple[ScheduledRow, ...]
    depends_on_previous: bool = False

    def list_captured(self) -> list[CapturedRow]:
        """Returns the rows whose requests capture inputs."""
        return [
            CapturedRow(row.request.capture, row.row, row.num_tokens)
            for row in self.rows
            if row.request.capture is not None
        ]


class RowTokens(msgspec.Struct, frozen=True):
    """New tokens of a row's request, at least one; without those behind a token that ended the request."""

    row: ScheduledRow
    token_ids: list[int]
