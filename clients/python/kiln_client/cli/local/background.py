"""The services of a home: finds running ones, starts them in the background, stops them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kiln_client.errors import FailedPrecondition, Unavailable
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import StackRecord, make_home, read_record
from kiln_client.stack.service_process import open_log, read_tail
from kiln_client.stack.stack import LOCKED_OUT, READY_TIMEOUT_S, STOP_TIMEOUT_S

_POLL_S: Final = 0.05

#: Told what the services do, for a person who waits.
OnRemark = Callable[[str], None]


async def reach_services(home: Path, model_roots: Sequence[Path], on_remark: OnRemark) -> StackRecord:
    """Returns where the services of a home listen. Starts them in the background if none run.

    If services that run in the background may not read one of `model_roots`, they are started again with it. The
    compiler must be able to read `model_roots`, which have no links. The home is created if it is missing.
    """
    record = read_record(home)
    if record is None:
        on_remark(f"starting the services of {home}; `kiln down` ends them")
        return await _start(home, model_roots)
    missing = [root for root in model_roots if not record.reads(root)]
    if not missing:
        return record
    if not record.is_detached:
        raise FailedPrecondition(
            f"the services of {home} read checkpoints below {', '.join(record.model_roots)} only: start them with"
            f" --model-root {missing[0]}",
            reason="MODEL_ROOT_MISSING",
            metadata={"home": home, "path": missing[0]},
        )
    if await _count_requests(record):
        raise FailedPrecondition(
            f"the services of {home} must start again to read {missing[0]}, but they are answering requests: try again"
            " when those have ended, or end the services with `kiln down`",
            reason="HOME_BUSY",
            metadata={"home": home, "path": missing[0]},
        )
    on_remark(f"starting the services of {home} again, so that they read {missing[0]}")
    await stop_services(home, record)
    known = [Path(root) for root in record.model_roots]
    return await _start(home, [*(root for root in known if root.is_dir()), *missing])


async def stop_services(home: Path, record: StackRecord) -> None:
    """Ends the services of a home and waits until they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    # Each service has STOP_TIMEOUT_S before it is killed; the two end at the same time.
    deadline = time.monotonic() + STOP_TIMEOUT_S + READY_TIMEOUT_S
    while _is_alive(record.pid):
        if time.monotonic() > deadline:
            raise FailedPrecondition(
                f"the services of {home} were asked to end, and process {record.pid} still runs",
                reason="SERVICES_NOT_STOPPED",
                metadata={"home": home, "pid": record.pid},
            )
        await asyncio.sleep(_POLL_S)


async def _start(home: Path, model_roots: Sequence[Path]) -> StackRecord:
    log_path = home / "logs" / "services.log"
    make_home(home)
    log_path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "kiln_client.stack", "--home", str(home)]
    command += [word for root in model_roots for word in ("--model-root", str(root))]
    with open_log(log_path, is_new=True) as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - forks, and does not wait
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,  # not where a person works: `python -m` looks for modules in the current directory first
            start_new_session=True,
        )
    # Reaps them: this process may be a long one, and to others they would seem to run until it ends.
    threading.Thread(target=process.wait, name="kiln-services", daemon=True).start()
    deadline = time.monotonic() + 2 * READY_TIMEOUT_S
    while time.monotonic() < deadline:
        record = read_record(home)
        if record is not None:
            return record
        # Of two commands that start services at the same time, one finds the home locked: it uses the other's.
        if process.poll() not in (None, LOCKED_OUT):
            raise _not_started(f"they ended with code {process.returncode}", log_path)
        await asyncio.sleep(_POLL_S)
    raise _not_started("they were not ready in time", log_path)


def _not_started(detail: str, log_path: Path) -> Unavailable:
    return Unavailable(
        f"the services did not start: {detail}; their log is {log_path}\n{read_tail(log_path)}".rstrip("\n"),
        reason="SERVICES_NOT_STARTED",
        metadata={"log": log_path},
    )


async def _count_requests(record: StackRecord) -> int:
    async with AsyncRuntime(record.runtime, **record.connection) as runtime:
        deployments = await runtime.list_deployments()
    return sum(deployment.load.used_slots + deployment.load.queued_requests for deployment in deployments)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
