"""Both services, and the calls that are measured once: compiling, loading, swapping weights."""

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
from typing import Final

import psutil
from kiln_client import Compiler, Runtime, compile_request

from bench.plan import Plan

#: Id of the deployment that is measured.
DEPLOYMENT: Final = "measured"


@dataclass(frozen=True)
class Services:
    """Addresses of both services, and the process of the runtime's front."""

    compiler: str
    runtime: str
    front: psutil.Process


@contextmanager
def running_services(home: Path, models: Path) -> Iterator[Services]:
    """Starts both services on free ports, with one logical core, so that idle deployments cost no time."""
    kiln = str(Path(sys.executable).with_name("kiln"))
    addresses = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
    command = [kiln, "up", "--json", "--home", str(home), "--model-root", str(models), "--cores", "1"]
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


@contextmanager
def deployed(services: Services, digest: str, num_threads: int) -> Iterator[float]:
    """Serves a bundle as DEPLOYMENT, alone; yields the seconds until it was ready."""
    with Runtime(services.runtime) as runtime:
        start = time.perf_counter()
        runtime.load_bundle(digest, DEPLOYMENT, threads_per_core=num_threads)
        yield time.perf_counter() - start
        runtime.unload_bundle(DEPLOYMENT)


def swap_weights(services: Services, digest: str) -> float:
    """Loads a bundle's weights into DEPLOYMENT; returns the seconds in which it ran no step."""
    with Runtime(services.runtime) as runtime:
        return runtime.load_weights(DEPLOYMENT, digest).pause_duration.ToTimedelta().total_seconds()


def _find_front(launcher: int) -> psutil.Process:
    for process in psutil.Process(launcher).children(recursive=True):
        if "runtime_svc" in process.cmdline():
            return process
    raise LookupError("no process runs runtime_svc")
