"""The progress of a compile: it moves, says how long it will take, and goes on saying that it goes on."""

from __future__ import annotations

import asyncio
import io
import time

import pytest
from google.protobuf.duration_pb2 import Duration
from kiln.compiler.v1.compiler_pb2 import CompileMetadata, CompileStage
from kiln_client.cli import progress as module
from kiln_client.cli.output import Output
from kiln_client.cli.progress import Countdown, ProgressView
from rich.console import Console
from rich.progress_bar import ProgressBar

from tests.hang_guard import HANG_S


def lowering(eta_s: int | None, done: int = 0) -> CompileMetadata:
    eta = None if eta_s is None else Duration(seconds=eta_s)
    stage = CompileStage.COMPILE_STAGE_LOWER
    return CompileMetadata(stage=stage, executables_done=done, executables_total=4, eta=eta)


def test_a_countdown_runs_down_and_is_corrected() -> None:
    countdown = Countdown(100.0)
    assert (countdown.share(105.0), countdown.text(105.0)) == (None, "")
    countdown.estimate(100.0, 90.0)
    assert (countdown.share(100.0), countdown.text(100.0)) == (0.0, "about 1 min 30 s left")
    assert (countdown.share(145.0), countdown.text(145.0)) == (0.5, "about 45 s left")
    countdown.estimate(150.0, 150.0)
    assert (countdown.share(150.0), countdown.text(150.0)) == (0.25, "about 2 min 30 s left")


def test_a_countdown_that_was_too_short_never_ends() -> None:
    countdown = Countdown(0.0)
    countdown.estimate(0.0, 10.0)
    shares = [countdown.share(now_s) or 0.0 for now_s in (9.0, 10.0, 20.0, 1000.0)]
    assert shares == sorted(shares)
    assert 0.9 <= shares[0] <= shares[-1] < 1
    assert countdown.text(20.0) == ""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


@pytest.fixture
def terminal() -> Output:
    output = Output(as_json=False)
    output.remarks = Console(file=io.StringIO(), force_terminal=True, width=120)
    return output


async def test_the_bar_moves_before_the_first_executable_is_done(clock: Clock, terminal: Output) -> None:
    def draw() -> tuple[ProgressBar, str]:
        assert view._bar is not None
        (task,) = view._bar.tasks
        bar, text = (column(task) for column in view._bar.columns[2:6:3])
        assert isinstance(bar, ProgressBar)
        return bar, str(text)

    with ProgressView(terminal) as view:
        view.compiled(CompileMetadata(stage=CompileStage.COMPILE_STAGE_TRACE, executables_total=4))
        assert draw()[0].total is None, "nothing says how long it takes: the bar pulses"
        view.compiled(lowering(20))
        clock.now_s = 5.0
        bar, text = draw()
        assert (bar.percentage_completed, text) == (25.0, "about 15 s left")
        view.compiled(lowering(15, done=3))
        assert draw()[0].percentage_completed == 75.0, "what is done counts if it is more"
        view.compiled(lowering(None, done=2))
        assert draw()[0].percentage_completed == 50.0


async def test_without_a_terminal_a_line_says_that_it_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressView(Output(as_json=False), heartbeat_s=0.05) as view:
        begun_s = time.monotonic()
        view.compiled(lowering(30))
        said = ""
        async with asyncio.timeout(HANG_S):
            while said.count("\n") < 3:
                await asyncio.sleep(0.01)
                said += capfd.readouterr().err
    taken_s = time.monotonic() - begun_s
    await asyncio.sleep(0.1)
    first, *beats = (said + capfd.readouterr().err).splitlines()
    assert first == "lower 0/4 executables about 30 s left"
    assert set(beats) == {"lower 0/4 executables 0 s so far, about 30 s left"} or taken_s > 0.9
    assert 2 <= len(beats) <= taken_s / 0.05


async def test_for_a_program_only_changes_count(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressView(Output(as_json=True), heartbeat_s=0.01) as view:
        view.compiled(lowering(30))
        await asyncio.sleep(0.05)
    captured = capfd.readouterr()
    assert (len(captured.out.splitlines()), captured.err) == (1, "")
