"""Gives commands as a user does in a terminal: one after the other, each with what those before have exported."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.first_hour.commands import fill_in
from tests.first_hour.steps import Step

TIMEOUT_S = 3600.0
_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 120.0
_POLL_S = 0.1
#: Variables that would tell commands of another Kiln or another Python.
_FOREIGN = re.compile(r"KILN_|PYTHON(PATH|HOME)$|VIRTUAL_ENV|XDG_DATA_HOME|MAKE(FLAGS|LEVEL)$")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes:
        seconds: How long it took; of one that stays, until its output said that it is ready.
        output: What it wrote to standard output and standard error.
        failure: What differs from the step's expectation; empty if nothing does.
    """

    seconds: float
    output: str
    failure: str = ""


class Terminal:
    """One terminal of one user. When it is closed, the commands that stay end with SIGTERM."""

    def __init__(self, clone: Path, data_home: Path) -> None:
        """Opens it in a fresh clone, whose `.venv` is active; what Kiln keeps of its user is in `data_home`."""
        self._clone = clone
        self._environment = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
        self._environment |= {
            "PATH": f"{clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
            "XDG_DATA_HOME": str(data_home),
            "NO_COLOR": "1",
        }
        self._staying: list[subprocess.Popen[bytes]] = []

    def has(self, test: str) -> bool:
        """Whether a shell command succeeds."""
        return self._start(test, subprocess.DEVNULL).wait(timeout=TIMEOUT_S) == 0

    def give(self, step: Step, printed: str) -> Outcome:
        """Gives the command of a step, and looks whether it does what the step expects."""
        with tempfile.TemporaryDirectory() as scratch:
            output, variables = Path(scratch, "output"), Path(scratch, "variables")
            # What a command exports, the next ones have.
            command = f"{fill_in(step, printed)}\ncode=$?\nenv -0 > {variables}\nexit $code"
            start_s = time.monotonic()
            with output.open("wb") as file:
                process = self._start(command, file, folder=step.folder, typed=step.typed)
                code = self._wait_for_output(process, step, output) if step.stays else self._wait(process)
            seconds = time.monotonic() - start_s
            text = output.read_text(errors="replace")
            if variables.exists():
                self._environment |= _read_variables(variables)
        return Outcome(seconds, text, find_failure(step, code, seconds, text))

    def _start(self, command: str, output: object, *, folder: str = ".", typed: str = "") -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as terminal:
            terminal.write(typed.encode())
            terminal.seek(0)
            return subprocess.Popen(
                ["bash", "-c", command],
                cwd=self._clone / folder,
                env=self._environment,
                stdin=terminal,
                stdout=output,  # type: ignore[call-overload]
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        try:
            return process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None

    def _wait_for_output(self, process: subprocess.Popen[bytes], step: Step, output: Path) -> int | None:
        self._staying.append(process)
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline_s and process.poll() is None:
            if re.search(step.expects, output.read_text(errors="replace")):
                return 0
            time.sleep(_POLL_S)
        return process.poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._staying):
            _end_group(process)


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """Ends a shell and the command that it runs, which may take longer than the shell."""
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
        while time.monotonic() < deadline_s:
            leader.poll()  # reaps the shell, so that the group is gone once its last process is
            os.killpg(leader.pid, 0)
            time.sleep(_POLL_S)
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def _read_variables(path: Path) -> dict[str, str]:
    pairs = (one.partition("=") for one in path.read_text(errors="replace").split("\0") if one)
    return {name: value for name, _, value in pairs}


def find_failure(step: Step, code: int | None, seconds: float, output: str) -> str:
    """What differs from a step's expectation; empty if nothing does.

    Args:
        code: Exit code; None if the command did not end, or did not get ready, in time.
    """
    if code is None:
        return "it did not end in time" if not step.stays else "it did not get ready in time"
    if code:
        return f"it ended with code {code}"
    if not re.search(step.expects, output):
        return f"its output has nothing like {step.expects!r}"
    if step.limit_s is not None and seconds > step.limit_s:
        return f"it took {seconds:.0f} s, and may take {step.limit_s:.0f} s"
    return ""
