"""Whatever error ends a stage of a plan or of a build, its caller hears of it by name, with the stage and its text."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest

from bundle.errors import KilnError
from compiler_svc.builds import process
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.planning.process import run_order
from compiler_svc.records import Stage
from execution.forkserver.task import Ending, _read_answer, serve_order


class Untold(Exception):
    """An error whose text is one more error."""

    def __str__(self) -> str:
        raise ValueError


#: What a stage may raise, and what callers hear of it.
ERRORS: Final[tuple[tuple[BaseException, str], ...]] = (
    (ZeroDivisionError("float division by zero"), "ZeroDivisionError: float division by zero"),
    (KeyError("lm_head.weight"), "KeyError: 'lm_head.weight'"),
    (AssertionError(), "AssertionError"),
    (
        RuntimeError("size of a (3) must match b (4)\n#0 at /home/me/torch/x.cpp"),
        "RuntimeError: size of a (3) must match b (4)",
    ),
    (
        OSError(errno.ENOENT, "No such file or directory", "/home/me/models/a.bin"),
        "FileNotFoundError: [Errno 2] No such file or directory: 'a.bin'",
    ),
    (
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff",
    ),
    (RecursionError("maximum recursion depth exceeded"), "RecursionError: maximum recursion depth exceeded"),
    (ValueError("a name \udcff of no text"), "ValueError: a name ? of no text"),
    (TypeError("x" * 9000), "TypeError: xxx"),
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (Untold(), "Untold: no text (ValueError)"),
)
NAMES: Final = [f"{number}-{type(error).__name__}" for number, (error, _) in enumerate(ERRORS)]
STAGES: Final = (Stage.TRACE, Stage.LOWER, Stage.SHARD, Stage.VERIFY, Stage.PUBLISH)


def serve(order: bytes, run: Callable[[int, int], None]) -> KilnError:
    """Does an order as a process does, and returns what its caller hears."""
    order_fd, answer_fd = os.memfd_create("order"), os.memfd_create("answer")
    os.write(order_fd, order)
    os.lseek(order_fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(answer_fd), "w+b") as answer:
        run(order_fd, answer_fd)
        failure = Ending(0, *_read_answer(answer)).failure
    assert failure is not None
    return failure


def check(failure: KilnError, reason: str, text: str) -> None:
    assert failure.reason == reason
    assert text in str(failure)
    assert "/home" not in str(failure)
    assert len(str(failure)) < 500
    assert "log" not in str(failure)


def fail(number: int) -> None:
    raise ERRORS[number][0]


@pytest.mark.parametrize("number", range(len(ERRORS)), ids=NAMES)
def test_of_a_plan(number: int) -> None:
    failure = serve(pickle.dumps(partial(fail, number)), partial(run_order, 1 << 30))
    check(failure, "PLAN_FAILED", f"planning failed: {ERRORS[number][1]}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", range(len(ERRORS)), ids=NAMES)
def test_of_a_build(number: int, stage: Stage) -> None:
    report = ProgressReport(lambda _: None)

    def build(_: bytes) -> Any:
        report.enter(stage, "in the middle")
        raise ERRORS[number][0]

    failure = serve(b"", partial(serve_order, do=build, explain=lambda error: process.explain(error, report.stage)))
    check(failure, "BUILD_FAILED", f"the build failed: {ERRORS[number][1]}")
    assert str(failure).endswith(f"(in the stage {stage})")
