"""SMG in front of runtimes, unmodified, as docs/fleet.md starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hang_guard import HANG_S

TIMEOUT_S = 60.0
#: SMG looks for runtimes that come back every minute otherwise.
FAST_RECOVERY = (
    *("--health-check-interval-secs", "1", "--health-success-threshold", "1"),
    *("--load-monitor-interval", "1"),
)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    """A port of the loopback address that was free a moment ago: SMG takes no port 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get_json(url: str) -> Any:
    with _OPENER.open(url, timeout=HANG_S) as response:
        return json.load(response)


def post_json(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with _OPENER.open(request, timeout=60) as response:
        return json.load(response)


@contextmanager
def run_gateway(directory: Path, runtimes: Sequence[str], *options: str, **variables: str) -> Iterator[str]:
    """Gives SMG's URL when it has every runtime and the tokenizer."""
    port = free_port()
    command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(f"grpc://{address}" for address in runtimes)]
    command += ["--request-id-headers", "kiln-takes-none"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), *options]
    log_path = directory / "gateway.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
    url = f"http://127.0.0.1:{port}"
    try:
        end_s = time.monotonic() + TIMEOUT_S
        while not _is_complete(url, len(runtimes)):
            assert process.poll() is None, log_path.read_text(errors="replace")[-4000:]
            assert time.monotonic() < end_s, log_path.read_text(errors="replace")[-4000:]
            time.sleep(0.05)
        yield url
    finally:
        process.kill()  # asked to end, it would wait for seconds until load balancers have noticed
        process.wait()


def _is_complete(url: str, num_runtimes: int) -> bool:
    try:
        workers = get_json(f"{url}/workers")["workers"]
        return len(workers) == num_runtimes and bool(get_json(f"{url}/v1/tokenizers")["tokenizers"])
    except OSError:
        return False
