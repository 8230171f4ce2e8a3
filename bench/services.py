"""Both services, and the calls that are measured once: compiling, loading, swapping weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from kiln_client import Compiler, Runtime, compile_request
from kiln_client.errors import NotFound

from bench.peers import ADAPTERS
from bench.plan import Workload
from bench.worker import Worker

#: Id of the deployment that is measured.
DEPLOYMENT: Final = "measured"
#: What a runtime prints before its address.
_READY: Final = "ready address="


@dataclass(frozen=True)
class Server:
    """A runtime: its address, its process, and the one below which its ranks run."""

    runtime: str
    front: psutil.Process
    launcher: psutil.Process

    def find_rank(self) -> psutil.Process:
        """Finds the process of the only rank of the only deployment."""
        return _find_process(self.launcher, "kiln-rank-0")


@dataclass(frozen=True)
class Services(Server):
    """Both services, as `kiln up` started them: a runtime, the compiler's address, and their home."""

    compiler: str
    home: Path

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
            front = _find_process(launcher, "runtime_svc")
            yield Services(event["runtime"], front, launcher, event["compiler"], home)
        finally:
            process.send_signal(signal.SIGTERM)


@contextmanager
def running_server(services: Services, cache: Path, options: Sequence[str]) -> Iterator[Server]:
    """Starts another runtime over the same bundles, with options of its own."""
    words = ["--address=127.0.0.1:0", f"--compiler={services.compiler}", f"--bundle-store={services.home / 'store'}"]
    words += [f"--cache={cache}", "--cores=1", f"--log-file={cache}.log", *options]
    command = [sys.executable, "-m", "runtime_svc", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith(_READY):
                raise RuntimeError(f"a runtime with {' '.join(options)} did not start, see {cache}.log")
            itself = psutil.Process(process.pid)
            yield Server(line.removeprefix(_READY).strip(), itself, itself)
        finally:
            process.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Compiled:
    """A bundle.

    Attributes:
        lowering_s: Seconds by the clock that each executable took to lower, beside others, by tag;
            none for those that the cache had.
        duration_s: Seconds by the clock of the whole compile.
        lowering_cpu_s: Processor seconds of all lowerings together.
    """

    digest: str
    lowering_s: dict[str, float]
    duration_s: float
    lowering_cpu_s: float


def compile_bundle(services: Services, name: str, config: dict[str, Any], model: str) -> Compiled:
    """Compiles a bundle for this host's processor."""
    with Compiler(services.compiler) as compiler:
        before_s = services.measure_lowerings()
        answer = compiler.compile(compile_request(name, model, config))
        durations = {one.tag: one.duration for one in answer.executables if one.HasField("duration")}
        return Compiled(
            answer.digest,
            {tag: duration.ToTimedelta().total_seconds() for tag, duration in durations.items()},
            answer.duration.ToTimedelta().total_seconds(),
            services.measure_lowerings() - before_s,
        )


@contextmanager
def deployed(server: Server, digest: str, num_threads: int) -> Iterator[float]:
    """Serves a bundle as DEPLOYMENT, alone; yields the seconds until it was ready."""
    with Runtime(server.runtime) as runtime:
        start = time.perf_counter()
        try:
            runtime.load_bundle(digest, DEPLOYMENT, threads_per_core=num_threads)
            yield time.perf_counter() - start
        finally:
            # A deployment that failed would be in the way of the next one; there is none if loading was refused.
            with suppress(NotFound):
                runtime.unload_bundle(DEPLOYMENT, in_flight="abort")


def swap_weights(server: Server, digest: str) -> float:
    """Loads a bundle's weights into DEPLOYMENT; returns the seconds in which it ran no step."""
    with Runtime(server.runtime) as runtime:
        return runtime.load_weights(DEPLOYMENT, digest).pause_duration.ToTimedelta().total_seconds()


def load_adapters(server: Services, digest: str, model: Path, count: int) -> None:
    """Loads an adapter of a bundle's model into DEPLOYMENT under so many names."""
    with Compiler(server.compiler) as compiler, Runtime(server.runtime) as runtime:
        adapter = compiler.shard_adapter("adapter", f"{model}{ADAPTERS}/0", digest).digest
        for number in range(count):
            runtime.load_adapter(DEPLOYMENT, adapter, name=f"adapter-{number}")


def measure_streams(
    clients: Worker, server: Server, workload: Workload, streams: int, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Lets clients stream from DEPLOYMENT, all at once; returns what `bench.streams.stream` does."""
    answer: dict[str, Any] = clients.call(
        "stream",
        address=server.runtime,
        deployment=DEPLOYMENT,
        streams=streams,
        context=workload.context,
        tokens=workload.count_tokens(streams),
        processes={"front": server.front.pid, "rank": server.find_rank().pid},
        options=dict(options or {}),
    )
    return answer


def _find_process(launcher: psutil.Process, word: str) -> psutil.Process:
    """Finds the descendant that has a word in its command line, or as its name."""
    for process in launcher.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == word or word in process.cmdline():
                return process
    raise LookupError(f"no process is called {word}")
