"""The witness of stalls: `python -m tests.soak.witness ADDRESS PID` checks the health of a server every 10 ms.

It runs in a process of its own, so that no client's work delays it, until its standard input closes; then it writes
one line of JSON. Each check asks for `liveness`, which the server's event loop answers at once unless something blocks
it.

A busy machine delays checks too. The kernel counts for each thread how long it was ready to run and had no processor
(`schedstat`). Off the time of a slow check, the witness takes what it waited itself, what the server's main thread
waited, and what that other thread of the server waited that waited longest: one of them may have held the interpreter's
lock, or have read the request. What remains is the server's own stall, and the figure that a run is held to.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

INTERVAL_S: Final = 0.01
#: A check that takes longer is explained by the waits of the threads.
SLOW_S: Final = 0.05
TIMEOUT_S: Final = 120.0

#: Seconds that each thread has computed, and has waited for a processor.
Clocks = dict[int, tuple[float, float]]


def read_clocks(pid: int | str) -> Clocks:
    """Reads the clocks of a process's threads."""
    clocks = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            computed, waited, _ = (path / "schedstat").read_text().split()
            clocks[int(path.name)] = (int(computed) / 1e9, int(waited) / 1e9)
    return clocks


def explain(pid: int, before: Clocks, after: Clocks, own_wait_s: float, latency_s: float) -> dict[str, float]:
    """What a slow check spent its time on.

    Args:
        pid: Of the server, and so of its main thread.
        own_wait_s: What the witness waited for a processor meanwhile.
    """
    moved = {
        thread: (computed - before.get(thread, (0.0, 0.0))[0], waited - before.get(thread, (0.0, 0.0))[1])
        for thread, (computed, waited) in after.items()
    }
    computed_s, main_wait_s = moved.get(pid, (0.0, 0.0))
    others_wait_s = max((waited for thread, (_, waited) in moved.items() if thread != pid), default=0.0)
    stall_s = max(0.0, latency_s - own_wait_s - main_wait_s - others_wait_s)
    return {"latency_s": latency_s, "stall_s": stall_s, "computed_s": computed_s, "waited_s": main_wait_s}


def watch(address: str, pid: int, ended: threading.Event) -> Iterator[dict[str, float]]:
    """Checks until `ended`; yields the explanation of each check, and when it began."""
    checks = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))
    request = health_pb2.HealthCheckRequest(service="liveness")
    next_s = time.monotonic()
    while not ended.is_set():
        clocks, own = read_clocks(pid), read_clocks("self")
        begun_s = time.monotonic()
        checks.Check(request, timeout=TIMEOUT_S, wait_for_ready=True)
        latency_s = time.monotonic() - begun_s
        explained = {"latency_s": latency_s, "stall_s": latency_s}
        if latency_s > SLOW_S:
            own_wait_s = max(
                waited - own.get(thread, (0.0, 0.0))[1] for thread, (_, waited) in read_clocks("self").items()
            )
            explained = explain(pid, clocks, read_clocks(pid), own_wait_s, latency_s)
        yield {"time_s": begun_s, **explained}
        # A check that took longer than the interval is followed by the next one at once, and not by all that it missed.
        next_s = max(next_s + INTERVAL_S, time.monotonic())
        ended.wait(next_s - time.monotonic())


def summarize(checks: list[dict[str, float]]) -> dict[str, Any]:
    """Percentiles of the latencies and of the stalls, in seconds, and the checks that stalled longest."""

    def percentiles(field: str) -> dict[str, float]:
        values = sorted(check[field] for check in checks)
        return {name: values[min(len(values) - 1, int(len(values) * share))] for name, share in SHARES.items()}

    longest = sorted(checks, key=lambda check: check["stall_s"], reverse=True)[:10]
    return {
        "num_checks": len(checks),
        "latency": percentiles("latency_s"),
        "stall": percentiles("stall_s"),
        "longest": longest,
    }


SHARES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def main() -> None:
    """Watches until standard input closes, and writes the summary."""
    address, pid = sys.argv[1], int(sys.argv[2])
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    json.dump(summarize(list(watch(address, pid, ended))), sys.stdout)


if __name__ == "__main__":
    main()
