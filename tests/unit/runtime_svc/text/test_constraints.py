"""What the process that follows sequences is asked, and what becomes of its errors."""

from __future__ import annotations

from typing import Any

import pytest

from bundle.errors import KilnError
from execution.text.constraint import Constraint, NextTokens
from execution.text.control import Follow, Followed, Load
from execution.text.errors import TextLimitExceeded, TextRefused
from execution.text.handle import TextLimits
from runtime_svc.errors import ConstraintFailed, ConstraintLimitExceeded
from runtime_svc.text.constraints import ConstraintProcesses

CONSTRAINT, MASK = Constraint(kind="regex", text="a*"), b"\1\0\0\0"


class Process:
    """Stands for the queue of the process, which fails with the sequences of `errors`."""

    def __init__(self) -> None:
        self.calls: list[Follow] = []
        self.errors: dict[int, KilnError] = {}
        self.found = NextTokens("KNOWN", MASK)

    async def get(self) -> Process:
        return self

    async def run(self, _: None, call: Follow, *_args: object) -> Followed:
        self.calls.append(call)
        for one in call.sequences:
            if one.number in self.errors:
                raise self.errors[one.number]
        return Followed(sequences=[self.found for _ in call.sequences])


def make() -> tuple[ConstraintProcesses, Process]:
    nowhere: Any = None
    processes, process = ConstraintProcesses("d", Load(tokenizer=""), nowhere, TextLimits()), Process()
    processes._follower = process  # type: ignore[assignment]
    return processes, process


async def test_no_mask_is_asked_for_a_sequence_that_has_ended() -> None:
    processes, process = make()
    running, ended = (processes.begin(CONSTRAINT, MASK) for _ in range(2))
    for output in (running, ended):
        output.mask = None
    processes.end(ended)
    assert await processes.follow([(ended, [5]), (running, [5])]) == [None, None]
    assert [(([one.number for one in call.sequences]), call.ended) for call in process.calls] == [
        ([running.number], [ended.number])
    ]
    assert (running.mask, ended.mask) == (MASK, None)
    assert await processes.follow([(ended, [5])]) == [None]
    assert len(process.calls) == 1


async def test_masks_that_take_too_long_fail_by_name() -> None:
    processes, process = make()
    outputs = [processes.begin(CONSTRAINT, MASK) for _ in range(3)]
    process.errors[outputs[1].number] = TextLimitExceeded("finding tokens", "2 s of processor time")
    with pytest.raises(ConstraintLimitExceeded) as caught:
        await processes.follow([(output, [5]) for output in outputs])
    assert caught.value.metadata["limit"] == "2 s of processor time"


@pytest.mark.parametrize(
    ("found", "reason", "value"),
    [
        (
            NextTokens("FAILED", detail="step_lexer_fuel"),
            "CONSTRAINT_LIMIT_EXCEEDED",
            "reaches a limit: step_lexer_fuel",
        ),
        (NextTokens("UNSPELLED", detail="日"), "CONSTRAINT_UNSPELLED", "'日'"),
        (NextTokens("UNSPELLED"), "CONSTRAINT_UNSPELLED", "several characters"),
    ],
)
async def test_a_sequence_that_cannot_go_on_fails_by_name(found: NextTokens, reason: str, value: str) -> None:
    processes, process = make()
    process.found = found
    (error,) = await processes.follow([(processes.begin(CONSTRAINT, MASK), [5])])
    assert error is not None
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", reason)
    assert [(one.field, one.value) for one in error.violations] == [("constraint", value)]


async def test_what_the_process_refuses_is_no_fault_of_the_client() -> None:
    processes, process = make()
    output = processes.begin(CONSTRAINT, MASK)
    process.errors[output.number] = TextRefused("PanicException: it quotes the schema")
    with pytest.raises(ConstraintFailed) as caught:
        await processes.follow([(output, [5])])
    assert caught.value.code == "INTERNAL"
    assert "schema" not in str(caught.value)
