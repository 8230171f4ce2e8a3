"""Both services, and what one asks of them once: compiling, loading, swapping weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from kiln_client import Compiler, Runtime, compile_request

from bench.plan import Plan


@dataclass(frozen=True)
class Services:
    """Addresses of both services, and the process of the runtime's front."""

    compiler: str
    runtime: str
    front: psutil.Process


@contextmanager
def running_services(home: Path, models: Path, num_cores: int) -> Iterator[Services]:
    """Starts both services on free ports."""
    kiln = str(Path(sys.executable).with_name("kiln"))
    addresses = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
    command = [kiln, "up", "--json", "--home", str(home), "--model-root", str(models), "--cores", str(num_cores)]
    with subprocess.Popen([*command, *addresses], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            event = json.loads(process.stdout.readline())
            yield Services(event["compiler"], event["runtime"], _find_front(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Compiled:
    """A bundle: its digest, and the seconds that each of its executables took to lower, by tag."""

    digest: str
    lowering_s: dict[str, float]


def compile_bundles(services: Services, plan: Plan, model: str) -> dict[int, Compiled]:
    """Compiles a bundle for each batch."""
    compiled = {}
    with Compiler(services.compiler) as compiler:
        for batch in plan.batches:
            answer = compiler.compile(compile_request(f"batch{batch}", model, plan.config(batch)))
            lowering_s = {one.tag: one.duration.ToTimedelta().total_seconds() for one in answer.executables}
            compiled[batch] = Compiled(answer.digest, lowering_s)
    return compiled


def load_bundles(services: Services, plan: Plan, compiled: dict[int, Compiled]) -> dict[str, float]:
    """Loads each bundle as `batchN`; returns seconds until one served, the `first` time and `again`."""
    durations = {}
    with Runtime(services.runtime) as runtime:
        first = plan.batches[0]
        for attempt in ("first", "again"):
            start = time.perf_counter()
            runtime.load_bundle(compiled[first].digest, f"batch{first}", threads_per_core=plan.num_threads)
            durations[attempt] = time.perf_counter() - start
            if attempt == "first":
                runtime.unload_bundle(f"batch{first}")
        for batch in plan.batches[1:]:
            runtime.load_bundle(compiled[batch].digest, f"batch{batch}", threads_per_core=plan.num_threads)
    return durations


def swap_weights(services: Services, deployment: str, digest: str) -> float:
    """Loads a bundle's weights into a deployment; returns the seconds in which it computed nothing."""
    with Runtime(services.runtime) as runtime:
        return runtime.load_weights(deployment, digest).pause_duration.ToTimedelta().total_seconds()


def _find_front(launcher: int) -> psutil.Process:
    for process in psutil.Process(launcher).children(recursive=True):
        if "runtime_svc" in process.cmdline():
            return process
    raise LookupError("no process runs runtime_svc")
