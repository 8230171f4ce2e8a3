"""Asks a module of another distribution what it finds on this host, in a process of its own.

The client imports no other distribution of Kiln, and what a library of the host does to a process ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kiln_client.stack.service_process import Service

OnProgress: TypeAlias = Callable[[str], None]
"""Called with what a check does now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found.

    Attributes:
        status: Whether the host passes it; `not_run` if an earlier check that it needs did not.
        summary: What was found, or what is wrong, in one line.
        advice: What to do next, a command if there is one; empty if the status is ok.
        details: Figures for programs; values of JSON.
    """

    status: Literal["ok", "failed", "not_run"]
    summary: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


async def run_probe(
    service: Service, words: Sequence[str], on_progress: OnProgress, environment: Mapping[str, str]
) -> Finding:
    """Runs `python -m MODULE WORDS` until it has printed its finding. If the caller cancels this, kills the process.

    `on_progress` is called with each line of progress. The process inherits variables, and gets `environment` besides.
    """
    service.require_installed()
    python = [sys.executable, "-m", service.module, *words]
    async with _running(python, {**service.environment, **environment}) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        last_words = asyncio.create_task(process.stderr.read())
        found: dict[str, Any] | None = None
        async for line in process.stdout:
            record = _parse(line)
            if "progress" in record:
                on_progress(record["progress"])
            found = record.get("finding", found)
        code = await process.wait()
        complaint = (await last_words).decode(errors="replace").strip().splitlines()
    if found is None:
        reason = complaint[-1] if complaint else "it printed nothing"
        summary = f"python -m {service.module} ended with exit code {code}: {reason}"
        return Finding(status="failed", summary=summary, advice=" ".join(["python", "-m", service.module, *words]))
    return Finding(
        status="ok" if found["ok"] else "failed",
        summary=found["summary"],
        advice=found["advice"],
        details=found["details"],
    )


@contextlib.asynccontextmanager
async def _running(command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # What it has started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _parse(line: bytes) -> dict[str, Any]:
    """Reads a line; an empty record for what a library of the host has printed."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
