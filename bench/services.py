"""Both services, and the calls that are measured once: compiling, loading, swapping weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from kiln_client import Compiler, Runtime, compile_request

#: Id of the deployment that is measured.
DEPLOYMENT: Final = "measured"


@dataclass(frozen=True)
class Services:
    """Addresses of both services, and the processes that `kiln up` started."""

    compiler: str
    runtime: str
    front: psutil.Process
    launcher: psutil.Process

    def find_rank(self) -> psutil.Process:
        """Finds the process of the only rank of the only deployment.

        Raises:
            LookupError: No process is a rank.
        """
        return _find_process(self.launcher, "kiln-rank-0")

    def measure_lowerings(self) -> float:
        """Processor seconds of all lowerings so far, their C++ compilers included; 0 before the first."""
        try:
            times = _find_process(self.launcher, "kiln-lowerings").cpu_times()
        except LookupError:
            return 0.0
        return float(times.children_user + times.children_system)


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
            launcher = psutil.Process(process.pid)
            yield Services(event["compiler"], event["runtime"], _find_process(launcher, "runtime_svc"), launcher)
        finally:
            process.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Compiled:
    """A bundle.

    Attributes:
        digest: Its digest.
        lowering_s: Seconds by the clock that each executable took to lower, beside others, by tag;
            none for those that the cache had.
        duration_s: Seconds by the clock of the whole compile.
        lowering_cpu_s: Processor seconds of all lowerings together.
    """

    digest: str
    lowering_s: dict[str, float]
    duration_s: float
    lowering_cpu_s: float


def compile_bundles(services: Services, configs: Mapping[str, dict[str, Any]], model: str) -> dict[str, Compiled]:
    """Compiles bundles for this host's processor.

    Args:
        services: What compiles.
        configs: The InferenceConfig of each bundle, by its name.
        model: Directory below the model root.
    """
    compiled = {}
    with Compiler(services.compiler) as compiler:
        for name, config in configs.items():
            before_s = services.measure_lowerings()
            answer = compiler.compile(compile_request(name, model, config))
            compiled[name] = Compiled(
                answer.digest,
                {
                    one.tag: one.duration.ToTimedelta().total_seconds()
                    for one in answer.executables
                    if one.HasField("duration")
                },
                answer.duration.ToTimedelta().total_seconds(),
                services.measure_lowerings() - before_s,
            )
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


def _find_process(launcher: psutil.Process, word: str) -> psutil.Process:
    """Finds the descendant that has a word in its command line, or as its name."""
    for process in launcher.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == word or word in process.cmdline():
                return process
    raise LookupError(f"no process is called {word}")
