"""Processes that measure one thing at a time, when told to. Standard library only: peers have their own environment."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]


class WorkerFailed(Exception):
    """A worker ended, or its action failed."""


class Worker:
    """The parent's handle of a process that runs `serve`."""

    def __init__(
        self, module: str, *, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts `python -m module` at the root of the tree."""
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def call(self, action: str, *, timeout_s: float = 300.0, **arguments: Any) -> Any:
        """Runs an action in the worker and waits for its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"action": action, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        # An answer is one line, and no answer comes unasked, so none lies in a buffer that `select` does not see.
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.kill()
            self._process.wait()
            raise WorkerFailed(f"{action}: no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"{action}: the process ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{action}: {answer['error']}")
        return answer["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def serve(actions: Mapping[str, Callable[..., Any]]) -> None:
    """Runs the actions that standard input asks for until it ends; all other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": actions[request["action"]](**request["arguments"])}
        except Exception as error:  # noqa: BLE001 - the parent is told of every error
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def time_steps(step: Callable[[], object], *, warm_up: int, steps: int) -> dict[str, Any]:
    """Times `steps` calls, after `warm_up` calls that do not count.

    `wall_s` has the seconds of each call by the clock. `cpu_s` is processor seconds of one call, of all threads of this
    process, those that wait for others included.
    """
    durations = []
    for _ in range(warm_up):
        step()
    processor = time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        durations.append(time.perf_counter() - start)
    return {"wall_s": durations, "cpu_s": (time.process_time() - processor) / steps}


def median(values: Sequence[float]) -> float:
    """The middle value, or the one below the middle if their number is even."""
    return sorted(values)[(len(values) - 1) // 2]
