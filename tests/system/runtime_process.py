"""A runtime process of a test's own, to be killed and started again on the same directories."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc
from kiln.runtime.v1 import generation_pb2_grpc, runtime_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as runtime

from runtime_svc.deployments.records import FILE_NAME, RUNTIME_ID
from tests.hang_guard import HANG_S
from tests.processes import descendants, is_rank, living_descendants, name_of
from tests.repository import ROOT
from tests.servers.stack import token_request, tokens_of
from tests.system.conftest import CONFIG

State = runtime.Deployment.State
#: Two executables are enough here, and load fast.
SMALL_CONFIG: dict[str, Any] = {
    "neuron_config": {
        **{name: value for name, value in CONFIG["neuron_config"].items() if "buckets" not in name},
        "enable_bucketing": False,
        "max_context_length": 64,
        "output_logits": False,
    }
}
PROMPT = [5, 6, 7]


class RuntimeProcess:
    """One process at a time; `kill` and `start` again."""

    def __init__(self, compiler: str | None, directory: Path, *arguments: str) -> None:
        self.directory = directory
        source = [] if compiler is None else [f"--compiler={compiler}"]
        self._arguments = [*source, f"--cache={directory / 'cache'}", "--cores=4", *arguments]
        self._process: subprocess.Popen[str] | None = None
        self._channel: grpc.Channel | None = None
        #: Of the last load, of a bundle or of weights, that the runtime has answered.
        self.answered_epoch = 0

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "runtime_svc", "--address=127.0.0.1:0", *self._arguments, *arguments]
        with (self.directory / "runtime.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready address="), (self.directory / "runtime.log").read_text()[-4000:]
        self.address = line.strip().removeprefix("ready address=")
        self._channel = grpc.insecure_channel(self.address)
        self.control = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self._channel)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it runs: it has been started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL; returns when every rank is gone too."""
        assert self._process is not None
        ranks = self.ranks()
        self._process.kill()
        self._process.wait(HANG_S)
        self.close_channel()
        _, alive = psutil.wait_procs(ranks, timeout=HANG_S)
        assert alive == [], "ranks outlived their runtime"

    def stop(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(HANG_S)
        self.close_channel()

    def hang_up(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def processes(self) -> list[psutil.Process]:
        """The runtime itself and its forkservers."""
        assert self._process is not None
        forkservers = [child for child in descendants(self._process.pid) if not is_rank(child)]
        return [psutil.Process(self._process.pid), *forkservers]

    def find(self, name: str) -> list[psutil.Process]:
        """Its living processes of a name; `runtime` is the service itself."""
        return (
            [self.processes()[0]]
            if name == "runtime"
            else [child for child in living_descendants(self.pid) if name_of(child) == name]
        )

    def ranks(self) -> list[psutil.Process]:
        """Rank processes, by start."""
        assert self._process is not None
        ranks = [child for child in descendants(self._process.pid) if is_rank(child)]
        return sorted(ranks, key=lambda rank: rank.create_time())

    def load(self, ref: str, deployment_id: str = "d", **options: Any) -> runtime.Deployment:
        request = runtime.LoadBundleRequest(ref=ref, deployment_id=deployment_id, **options)
        deployment: runtime.Deployment = [*self.control.LoadBundle(request)][-1].deployment
        self.answered_epoch = 1
        return deployment

    def unload(self, deployment_id: str = "d") -> None:
        self.control.UnloadBundle(runtime.UnloadBundleRequest(deployment_id=deployment_id))

    def load_weights(self, ref: str, deployment_id: str = "d") -> runtime.LoadWeightsResult:
        request = runtime.LoadWeightsRequest(ref=ref, deployment_id=deployment_id)
        result: runtime.LoadWeightsResult = [*self.control.LoadWeights(request)][-1].result
        self.answered_epoch = result.weight_epoch
        return result

    def get(self, deployment_id: str = "d") -> runtime.Deployment:
        request = runtime.GetDeploymentRequest(deployment_id=deployment_id)
        return self.control.GetDeployment(request).deployment

    def ids(self) -> list[str]:
        return [one.id for one in self.control.ListDeployments(runtime.ListDeploymentsRequest()).deployments]

    def wait_for(self, *states: str, deployment_id: str = "d", timeout_s: float = HANG_S) -> runtime.Deployment:
        wanted = {State.Value(f"STATE_{state}") for state in states}
        deployment = self.get(deployment_id)
        end_s = time.monotonic() + timeout_s
        while deployment.state not in wanted:
            assert time.monotonic() < end_s, f"{State.Name(deployment.state)}: {deployment.message}"
            time.sleep(0.02)
            deployment = self.get(deployment_id)
        return deployment

    def generate(self, count: int = 20, deployment_id: str = "d") -> list[int]:
        request = token_request(deployment_id, PROMPT, count, temperature=0.0)
        return tokens_of(list(self.generation.Generate(request, timeout=60)))


@contextmanager
def run_runtime(compiler: str | None, directory: Path, *arguments: str) -> Iterator[RuntimeProcess]:
    """A started runtime that is stopped at the end, for good: so its leases end, too."""
    directory.mkdir(parents=True, exist_ok=True)
    process = RuntimeProcess(compiler, directory, *arguments)
    process.start()
    try:
        yield process
    finally:
        process.stop()
        if compiler is not None:
            release_leases(compiler, directory)


def release_leases(compiler: str, directory: Path) -> None:
    """Ends the leases of a stopped runtime whose state is somewhere below a directory."""
    (state,) = directory.rglob(FILE_NAME)
    with closing(sqlite3.connect(state)) as database:
        ((runtime_id,),) = database.execute("SELECT value FROM facts WHERE name = ?", (RUNTIME_ID,))
    with grpc.insecure_channel(compiler) as channel:
        request = bundle_pb2.ReleaseLeaseRequest(holder=f"runtime/{runtime_id}")
        bundle_pb2_grpc.BundleServiceStub(channel).ReleaseLease(request)


def assert_blobs_are_whole(cache: Path) -> int:
    """Hashes every blob of a cache; returns how many there are."""
    blobs = [path for path in (cache / "blobs/blobs/sha256").glob("*") if path.is_file() and len(path.name) == 64]
    for path in blobs:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    return len(blobs)


def wait_until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)


def send(process: psutil.Process, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to a process, which may be gone."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)
