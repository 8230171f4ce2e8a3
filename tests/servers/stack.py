"""Both services as a user starts them, the `kiln` command, and plain stubs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from google.longrunning import operations_pb2, operations_pb2_grpc
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import generation_pb2_grpc, runtime_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as runtime
from kiln_client import Bundles, Runtime

from bundle.store.layout import Layout
from tests.lowering_cache import share_lowering_cache
from tests.neuron.neuronx_cc import ORDERS as NEURONX_CC
from tests.processes import descendants, is_rank
from tests.repository import ROOT
from tests.servers.shared_bundles import SharedBundles, digest_action

KILN = str(Path(sys.executable).with_name("kiln"))
#: In the home of a stack, what the double of neuronx-cc is told, if it is told anything.
_NEURONX_CC_ORDERS: Final = "neuronx_cc.json"


@dataclass(frozen=True)
class Outcome:
    """What one command printed with --json."""

    exit_code: int
    events: list[dict[str, Any]]

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1]


@dataclass
class Stack:
    """A running pair of services."""

    process: subprocess.Popen[str]
    compiler: str
    runtime: str
    home: Path
    models: Path
    shared: SharedBundles | None

    @classmethod
    def start(cls, home: Path, *options: str, cores: int = 8, shared: SharedBundles | None = None) -> Stack:
        models = home / "extra-models"
        models.mkdir(parents=True, exist_ok=True)
        share_lowering_cache(home / "cache/compiler")
        command = [KILN, "up", "--json", "--home", str(home), "--cores", str(cores)]
        command += ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
        command += ["--model-root", str(ROOT / "examples/models"), "--model-root", str(models)]
        if shared is not None:
            command += ["--import-root", str(shared.layout.root)]
        variables = {f"KILN_{service}_LOG_LEVEL": "debug" for service in ("COMPILER", "RUNTIME")}
        variables[NEURONX_CC] = str(home / _NEURONX_CC_ORDERS)
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=os.environ | variables)
        assert process.stdout is not None
        line = process.stdout.readline()
        event = json.loads(line) if line else {}
        if event.get("event") != "ready":
            process.kill()
            raise RuntimeError(f"kiln up did not become ready: {line!r}; logs under {home / 'logs'}")
        return cls(process, event["compiler"], event["runtime"], home, models, shared)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    @property
    def token(self) -> Path:
        """The file of the home with the token that may do everything."""
        return self.home / "auth/token"

    def kiln(self, *arguments: str | Path, check: bool = True) -> Outcome:
        """Runs `kiln ARGUMENTS --json`, which finds the token of the home.

        To start the command takes half a second of a processor. What prepares tests asks the services itself.
        """
        addresses = {"KILN_COMPILER": self.compiler, "KILN_RUNTIME": self.runtime}
        environment = os.environ | addresses | {"KILN_HOME": str(self.home)}
        command = [KILN, *map(str, arguments), "--json"]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False
        )
        events = [json.loads(line) for line in result.stdout.splitlines()]
        assert events, f"kiln {arguments} printed nothing: {result.stderr}"
        assert not check or result.returncode == 0, events[-1]
        return Outcome(result.returncode, events)

    def new_model(self, name: str) -> Path:
        """Where to write a checkpoint: a path of this name that no other test of this stack has."""
        return Path(tempfile.mkdtemp(dir=self.models)) / name

    def compile(self, name: str, model: str | Path, config: dict[str, Any], *, level: int = 0) -> dict[str, Any]:
        path = self.home / f"{name}.json"
        path.write_text(json.dumps(config))
        return self.kiln("compile", path, "--model", model, "--name", name, "-O", str(level)).last

    def provide(self, name: str, model: Path, config: dict[str, Any], *, level: int = 0) -> str:
        """A bundle for tests that do not look at how it is compiled, once for all stacks of the run; its digest."""
        assert self.shared is not None, "a stack with bundles to share"
        with self.shared.claim(digest_action(model, config, level)) as (shared, add):
            if shared is not None:
                with Bundles(self.compiler, token=self.token) as bundles:
                    bundles.import_bundle(str(self.shared.layout.root), name, source_ref=shared)
                return shared
            digest = str(self.compile(name, model, config, level=level)["bundle"])
            add(Layout(self.home / "store"), digest)
            return digest

    @contextmanager
    def ordering_neuronx_cc(self, orders: dict[str, Any]) -> Iterator[None]:
        """Tells the double of neuronx-cc what to do instead of making a NEFF, as long as the block lasts."""
        path = self.home / _NEURONX_CC_ORDERS
        path.write_text(json.dumps(orders))
        try:
            yield
        finally:
            path.unlink()

    @contextmanager
    def deployed(self, deployment: str, ref: str = "", *options: str) -> Iterator[list[dict[str, Any]]]:
        """Loads a bundle, by default that of the deployment's name, for as long as it is needed; gives the events."""
        loaded = self.kiln("load", ref or deployment, "--deployment", deployment, *options)
        try:
            yield loaded.events
        finally:
            with Runtime(self.runtime, token=self.token) as service:
                service.unload_bundle(deployment)

    def list_leases(self) -> list[bundle_pb2.Lease]:
        """The leases of all runtimes."""
        with grpc.insecure_channel(self.compiler) as channel:
            response = bundle_pb2_grpc.BundleServiceStub(channel).ListLeases(bundle_pb2.ListLeasesRequest())
        return list(response.leases)

    def take_left(self) -> list[str]:
        """What tests have left here; it is ended, so that only the file fails that left it.

        Deployments, with their sessions; held cores; operations that go on; leases.
        """
        with grpc.insecure_channel(self.runtime) as to_runtime, grpc.insecure_channel(self.compiler) as to_compiler:
            service = runtime_pb2_grpc.RuntimeServiceStub(to_runtime)
            operations = operations_pb2_grpc.OperationsStub(to_compiler)
            bundles = bundle_pb2_grpc.BundleServiceStub(to_compiler)
            server = service.GetServerInfo(runtime.GetServerInfoRequest())
            num_cores = server.total_cores - server.free_cores
            left = [f"{num_cores} held cores"] if num_cores else []
            for deployment in service.ListDeployments(runtime.ListDeploymentsRequest()).deployments:
                left.append(f"deployment {deployment.id}")
                service.UnloadBundle(runtime.UnloadBundleRequest(deployment_id=deployment.id))
            for operation in operations.ListOperations(operations_pb2.ListOperationsRequest(page_size=1000)).operations:
                if not operation.done:
                    left.append(f"operation {operation.name}")
                    operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))
            for lease in self.list_leases():
                left.append(f"lease of {lease.holder} on {lease.digest}")
                bundles.ReleaseLease(bundle_pb2.ReleaseLeaseRequest(holder=lease.holder, digest=lease.digest))
        return left

    def get(self, deployment: str) -> runtime.Deployment:
        """What the runtime says of a deployment."""
        request = runtime.GetDeploymentRequest(deployment_id=deployment)
        return self.runtime_service().GetDeployment(request).deployment

    def ranks(self) -> set[psutil.Process]:
        """The living ranks of all deployments."""
        return {process for process in descendants(self.process.pid) if is_rank(process)}

    def generation(self) -> generation_pb2_grpc.GenerationServiceStub:
        return generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(self.runtime))

    def runtime_service(self) -> runtime_pb2_grpc.RuntimeServiceStub:
        return runtime_pb2_grpc.RuntimeServiceStub(grpc.insecure_channel(self.runtime))


def token_request(
    deployment: str, ids: list[int], max_new_tokens: int, *, request_id: str = "", **sampling: float
) -> generation.GenerateRequest:
    """A request from token ids that continues after end-of-sequence tokens."""
    return generation.GenerateRequest(
        deployment_id=deployment,
        request_id=request_id,
        token_ids=generation.TokenIds(ids=ids),
        sampling=generation.SamplingParams(**sampling),  # type: ignore[arg-type]
        stop=generation.StopConditions(max_new_tokens=max_new_tokens, ignore_eos=True),
    )


def tokens_of(events: list[generation.GenerateResponse]) -> list[int]:
    """Every token id of a finished stream, in order."""
    return [token.id for event in events for token in event.delta.tokens]
