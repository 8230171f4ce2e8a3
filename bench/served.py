"""The same executables through gRPC."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kiln_client import Runtime

TOKENS = 60


@dataclass(frozen=True)
class Services:
    """Addresses of both services."""

    compiler: str
    runtime: str


@contextmanager
def running_services(home: Path, models: Path) -> Iterator[Services]:
    """Starts both services on free ports."""
    kiln = str(Path(sys.executable).with_name("kiln"))
    addresses = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
    command = [kiln, "up", "--json", "--home", str(home), "--model-root", str(models), "--cores", "2", *addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        event = json.loads(process.stdout.readline())
        yield Services(event["compiler"], event["runtime"])
        process.send_signal(signal.SIGTERM)


def measure_streams(runtime: Runtime, deployment: str, num_streams: int) -> float:
    """Tokens per second over all streams, from the first token of any stream to the last."""

    def generate(_: int) -> tuple[float, float, int]:
        stamps = []
        prompt = list(range(5, 25))
        for event in runtime.generate(deployment, prompt, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True):
            stamps += [time.perf_counter()] * len(event.delta.tokens)
        return stamps[0], stamps[-1], len(stamps)

    with ThreadPoolExecutor(num_streams) as pool:
        spans = list(pool.map(generate, range(num_streams)))
    tokens = sum(count - 1 for *_, count in spans)
    return tokens / (max(last for _, last, _ in spans) - min(first for first, *_ in spans))
