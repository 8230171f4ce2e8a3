"""The two servers as targets: what exists there, how it is put back, and what their calls may do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.fuzzed_messages import Existing
from tests.processes import living_descendants
from tests.servers.answers import Answer, Meter, Rpc
from tests.servers.stack import Stack
from tests.system.conftest import CONFIG, TINY

NAME: Final = "tiny"
DEPLOYMENT: Final = "d"
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED

#: Calls whose streams never end by themselves: how many responses are read.
ENDLESS: Final[Mapping[str, int]] = {"/grpc.health.v1.Health/Watch": 1}

#: Names of a server's children whose processor time is spent on the answers of its calls.
ANSWERING_CHILDREN: Final[Mapping[str, tuple[str, ...]]] = {"compiler_svc": ("kiln-plans",), "runtime_svc": ()}

#: Services that a server is known to have besides those of `protos/kiln`.
FOREIGN_SERVICES: Final[Mapping[str, frozenset[str]]] = {
    "compiler_svc": frozenset({"google.longrunning.Operations"}),
    "runtime_svc": frozenset({"vllm.grpc.engine.VllmEngine"}),
}


@dataclass(frozen=True)
class Target:
    """A server under fuzz.

    Attributes:
        channel: Takes requests as bytes.
        find_existing: Asks for what exists there.
        restore: Puts back what calls have removed, and removes what they have started.
        undo: What follows an accepted call at once.
    """

    package: str
    channel: grpc.Channel
    meter: Meter
    find_existing: Callable[[], Existing]
    restore: Callable[[], None]
    undo: Callable[[Rpc, Answer], None]


def open_compiler(stack: Stack) -> Target:
    """The compiler of a stack, with the shipped model as bundle `tiny`."""
    channel = _connect(stack.compiler)
    bundles = bundle_pb2_grpc.BundleServiceStub(channel)
    operations = operations_pb2_grpc.OperationsStub(channel)
    assert stack.shared is not None
    layout = str(stack.shared.layout.root)

    def restore() -> None:
        listed = bundles.ListBundles(bundle_pb2.ListBundlesRequest(name=NAME)).bundles
        if not any(bundle.version == 1 for bundle in listed) or len(listed) > 50:
            stack.provide(NAME, TINY, CONFIG)
        newest = bundles.ListBundles(bundle_pb2.ListBundlesRequest(name=NAME, page_size=1)).bundles[0]
        bundles.SetAlias(bundle_pb2.SetAliasRequest(ref=f"{NAME}:v{newest.version}", alias="prod"))
        _cancel_all(operations)

    def find_existing() -> Existing:
        bundle = bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=NAME)).bundle
        page = bundles.ListBundles(bundle_pb2.ListBundlesRequest(page_size=1))
        names = [one.name for one in operations.ListOperations(operations_pb2.ListOperationsRequest()).operations]
        oldest = min(one.version for one in bundles.ListBundles(bundle_pb2.ListBundlesRequest(name=NAME)).bundles)
        references = (NAME, f"{NAME}@prod", f"{NAME}:v{oldest}", bundle.digest)
        return {
            "ref": references,
            "executables_ref": references,
            "name": (NAME, *names[:3]),
            "operation": tuple(names[:3]),
            "alias": ("prod", "new"),
            "digest": (bundle.digest,),
            "model": (TINY.name,),
            "config_json": ("{}", json.dumps(CONFIG)),
            "kind": (1, 1, 4),
            "isa": ("native", "", "x86-64-v3"),
            "layout": (layout,),
            "source_ref": (bundle.digest,),
            "page_token": ("", page.next_page_token),
            "holder": ("runtime/fuzz",),
            # Mostly none: a known one has the answer of its first request.
            "request_id": ("", "", "", "1"),
            "etag": ("", "1"),
            "service": _SERVICES,
            "list_services": ("",),
            "file_containing_symbol": _SERVICES,
        }

    def undo(rpc: Rpc, answer: Answer) -> None:
        if answer.code is grpc.StatusCode.OK and rpc.path.endswith(_STARTING):
            _cancel_all(operations)

    return Target("compiler_svc", channel, _find_meter(stack, "compiler_svc"), find_existing, restore, undo)


def open_runtime(stack: Stack) -> Target:
    """The runtime of a stack, with deployment `d` of the shipped model."""
    channel = _connect(stack.runtime)
    control = stack.runtime_service()

    def restore() -> None:
        found: dict[str, Any] = {}
        for deployment in control.ListDeployments(runtime.ListDeploymentsRequest()).deployments:
            if deployment.id == DEPLOYMENT and deployment.state == runtime.Deployment.STATE_READY:
                found[deployment.id] = deployment
            else:
                policy = runtime.IN_FLIGHT_POLICY_ABORT
                control.UnloadBundle(runtime.UnloadBundleRequest(deployment_id=deployment.id, in_flight_policy=policy))
        if not found:
            list(control.LoadBundle(runtime.LoadBundleRequest(ref=NAME, deployment_id=DEPLOYMENT)))

    def find_existing() -> Existing:
        return {
            "deployment_id": (DEPLOYMENT, DEPLOYMENT, "other"),
            "ref": (NAME, f"{NAME}:v1"),
            "ids": (1, 2, 3, 60),
            "input_ids": (1, 2, 3, 60),
            "token_ids": (1, 2, 3, 60),
            "text": ("Once upon a time", "a"),
            "role": ("user", "system", "assistant", "tool"),
            "content": ("Once upon", ""),
            "max_new_tokens": (1, 5, 20),
            "max_tokens": (1, 5, 20),
            "request_id": ("1", "2"),
            "request_ids": ("1", "2"),
            "service": (*_SERVICES, f"deployment/{DEPLOYMENT}"),
            "file_containing_symbol": _SERVICES,
        }

    return Target(
        "runtime_svc", channel, _find_meter(stack, "runtime_svc"), find_existing, restore, lambda _rpc, _answer: None
    )


#: Methods that start an operation.
_STARTING: Final = ("/Compile", "/ShardWeights", "/ShardAdapter", "/QuantizeWeights")
_SERVICES: Final = (
    *("", "liveness", "kiln.compiler.v1.CompilerService", "kiln.bundle.v1.BundleService"),
    *("kiln.runtime.v1.GenerationService", "kiln.runtime.v1.RuntimeService"),
)


def _connect(address: str) -> grpc.Channel:
    # What a call sends is no larger; what it receives may be.
    return grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])


def _cancel_all(operations: Any) -> None:
    for operation in operations.ListOperations(operations_pb2.ListOperationsRequest(filter="done=false")).operations:
        operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))


def _find_meter(stack: Stack, package: str) -> Meter:
    (process,) = (one for one in living_descendants(stack.process.pid) if one.cmdline()[1:3] == ["-m", package])
    return Meter(process.pid, ANSWERING_CHILDREN[package])
