"""What a principal made belongs to it: tenants of one pair of services, each with a valid token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from kiln_client import Bundles, Compiler, Runtime
from kiln_client.compile_requests import compile_request
from kiln_client.errors import AlreadyExists, InvalidArgument, KilnError, NotFound, PermissionDenied

from edge.access.issuer import Issuer
from tests.servers.stack import Stack
from tests.servers.tokens import bearer, make_claims
from tests.system.conftest import TINY

CONFIG = {
    "neuron_config": {
        "seq_len": 1024,
        "max_context_length": 128,
        "batch_size": 4,
        "torch_dtype": "float32",
        "enable_bucketing": True,
        "context_encoding_buckets": [128],
        "token_generation_buckets": [1024],
        "is_continuous_batching": True,
        "ctx_batch_size": 1,
        "is_block_kv_layout": True,
        "pa_block_size": 32,
        "pa_num_blocks": 128,
        "is_prefix_caching": True,
        "on_device_sampling_config": {"dynamic": True},
    }
}
#: Three blocks, and a token that has to be computed.
PROMPT = [*range(5, 102)]


class Tenant:
    """A principal with a token of the home's key, and its clients."""

    def __init__(self, stack: Stack, subject: str, scope: str, **patterns: list[str]) -> None:
        claims = {f"kiln_{kind}": names for kind, names in patterns.items()}
        self.token = Issuer(stack.home / "auth").sign(make_claims(scope, sub=subject, **claims))
        self.compiler = Compiler(stack.compiler, token=self.token)
        self.bundles = Bundles(stack.compiler, token=self.token)
        self.runtime = Runtime(stack.runtime, token=self.token)

    def start(self, name: str, model: Path | str = TINY, request_id: str = "") -> str:
        """Starts a compile; its operation's name."""
        request = compile_request(name, str(model), CONFIG, optimization_level=0, request_id=request_id)
        return self.compiler.start_compile(request).name

    def publish(self, name: str) -> str:
        """Compiles the shipped model; the version that names it."""
        result = self.compiler.wait_compile(self.start(name))
        return f"{result.name}:v{result.version}"

    def count_cached(self, deployment: str) -> int:
        """Sends the prompt; tokens of it that the cache held."""
        done = self.runtime.complete(deployment, PROMPT, max_new_tokens=1)
        return done.usage.cached_prompt_tokens

    def close(self) -> None:
        for client in (self.compiler, self.bundles, self.runtime):
            client.close()


Make = Callable[..., Tenant]


@pytest.fixture(scope="module")
def make(stack: Stack) -> Iterator[Make]:
    with ExitStack() as tenants:

        def make(subject: str, scope: str, **patterns: list[str]) -> Tenant:
            return tenants.enter_context(closing(Tenant(stack, subject, scope, **patterns)))

        yield make


@pytest.fixture(scope="module")
def alice(make: Make) -> Tenant:
    return make("alice", "infer compile")


@pytest.fixture(scope="module")
def bob(make: Make) -> Tenant:
    return make("bob", "infer compile")


@pytest.fixture(scope="module")
def root(make: Make) -> Tenant:
    return make("root", "admin")


@pytest.fixture(scope="module")
def operation(alice: Tenant) -> str:
    """Of alice, who is the first to compile a bundle `alices`; others wait for their turn in these tests."""
    name = alice.start("alices", request_id="nightly")
    alice.compiler.wait_compile(name)
    return name


@pytest.fixture(scope="module")
def shared(stack: Stack, operation: str) -> Iterator[str]:
    """A deployment that both tenants may use."""
    with stack.deployed("shared", "alices:v1"):
        yield "shared"


@contextmanager
def refused(error: type[KilnError], reason: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    assert caught.value.reason == reason, caught.value


def test_a_name_is_its_first_publishers(alice: Tenant, bob: Tenant, operation: str, shared: str) -> None:
    with refused(PermissionDenied, "NAME_OWNED"):
        bob.start("alices")
    with refused(PermissionDenied, "NAME_OWNED"):
        bob.compiler.shard_weights("alices", str(TINY), "alices")
    assert [one.version for one in bob.bundles.list_bundles("alices")] == [1]
    assert alice.publish("alices") == "alices:v1"
    assert bob.publish("bobs") == "bobs:v1"


def test_patterns_say_otherwise(make: Make, operation: str) -> None:
    release = make("release", "compile", bundles=["ali*", "release-*"])
    assert release.publish("alices") == "alices:v1"
    for name in ("release", "bobs", "new"):
        with refused(PermissionDenied, "BUNDLE_FORBIDDEN"):
            release.start(name)
        with refused(PermissionDenied, "BUNDLE_FORBIDDEN"):
            release.compiler.shard_weights(name, str(TINY), "alices")


def test_patterns_bind_those_who_import_and_delete(make: Make, stack: Stack, operation: str) -> None:
    janitor = make("janitor", "admin", bundles=["janitors-*"])
    with refused(PermissionDenied, "BUNDLE_FORBIDDEN"):
        janitor.bundles.delete_bundle("alices:v1")
    with refused(PermissionDenied, "BUNDLE_FORBIDDEN"):
        janitor.bundles.import_bundle(str(stack.home / "store"), "alices", source_ref="alices-v1")
    with refused(PermissionDenied, "BUNDLE_FORBIDDEN"):
        janitor.bundles.set_owner("alices", "janitor")
    assert make("janitor", "admin", bundles=["alices"]).bundles.get_bundle("alices:v1").version == 1


def test_a_name_without_owner_is_given_away(stack: Stack, alice: Tenant, bob: Tenant, operation: str) -> None:
    """As earlier releases, and services without authentication, have made them."""
    with Compiler(stack.compiler, token="") as anonymous:
        anonymous.compile(compile_request("ownerless", str(TINY), CONFIG, optimization_level=0))
    with refused(PermissionDenied, "NAME_OWNED"):
        alice.start("ownerless")
    with refused(PermissionDenied, "SCOPE_MISSING"):
        alice.bundles.set_owner("ownerless", "alice")
    given = stack.kiln("bundles", "give", "ownerless", "alice").last
    assert given == {"name": "ownerless", "owner": "alice", "former_owner": ""}
    assert alice.publish("ownerless") == "ownerless:v1"
    with refused(PermissionDenied, "NAME_OWNED"):
        bob.start("ownerless")


def test_operations_are_a_principals_own(
    stack: Stack, alice: Tenant, bob: Tenant, root: Tenant, operation: str
) -> None:
    assert alice.compiler.get_operation(operation).done
    assert root.compiler.get_operation(operation).done
    assert operation in [one.name for one in root.compiler.list_operations()]
    assert operation not in [one.name for one in bob.compiler.list_operations()]
    absent = "operations/0"
    for name in (operation, absent):
        with refused(NotFound, "OPERATION_NOT_FOUND"):
            bob.compiler.get_operation(name)
        with refused(NotFound, "OPERATION_NOT_FOUND"):
            bob.compiler.cancel_operation(name)
        with refused(NotFound, "OPERATION_NOT_FOUND"):
            bob.compiler.wait_compile(name)
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            wait_for(stack, bob, name)
    assert wait_for(stack, alice, operation).done


def wait_for(stack: Stack, tenant: Tenant, name: str) -> Any:
    with grpc.insecure_channel(stack.compiler) as channel:
        request = operations_pb2.WaitOperationRequest(name=name)
        return operations_pb2_grpc.OperationsStub(channel).WaitOperation(request, metadata=bearer(tenant.token))


def test_request_ids_of_compiles_are_unique_within_a_principal(alice: Tenant, bob: Tenant, operation: str) -> None:
    assert alice.start("alices", request_id="nightly") == operation
    own = bob.start("bobs", request_id="nightly")
    assert own != operation
    with refused(AlreadyExists, "REQUEST_ID_REUSED"):
        bob.start("bobs-2", request_id="nightly")


def test_request_ids_are_unique_within_a_principal(alice: Tenant, bob: Tenant, root: Tenant, shared: str) -> None:
    with alice.runtime.generate(shared, PROMPT, request_id="mine", max_new_tokens=900, ignore_eos=True) as events:
        assert next(iter(events)).accepted.request_id == "mine"
        with refused(AlreadyExists, "REQUEST_ID_IN_USE"):
            alice.runtime.complete(shared, PROMPT, request_id="mine", max_new_tokens=1)
        assert bob.runtime.complete(shared, PROMPT, request_id="mine", max_new_tokens=1).usage.generated_tokens == 1
        for request_id in ("mine", "ownerless"):
            assert bob.runtime.abort(shared, request_id) == "already_finished"
        assert alice.runtime.abort(shared, "mine") == "aborted"
    with alice.runtime.generate(shared, PROMPT, request_id="mine", max_new_tokens=900, ignore_eos=True) as events:
        next(iter(events))
        assert root.runtime.abort(shared, "mine") == "aborted"


def test_sessions_are_a_principals_own(alice: Tenant, bob: Tenant, shared: str) -> None:
    alice.runtime.complete(shared, PROMPT, session_id="chat", max_new_tokens=1)
    assert [one.id for one in alice.runtime.list_sessions(shared)] == ["chat"]
    assert bob.runtime.list_sessions(shared) == []
    for session_id in ("chat", "absent"):
        with refused(NotFound, "SESSION_NOT_FOUND"):
            bob.runtime.reset_kv_cache(shared, session_id=session_id)
    alice.runtime.reset_kv_cache(shared, session_id="chat")


def test_prefixes_are_shared_within_a_principal(stack: Stack, make: Make, shared: str) -> None:
    first, second = make("first", "infer"), make("second", "infer")
    assert [first.count_cached(shared) for _ in range(2)] == [0, 96]
    assert [second.count_cached(shared) for _ in range(2)] == [0, 96]
    with Runtime(stack.runtime, token="") as anonymous:
        assert anonymous.complete(shared, PROMPT, max_new_tokens=1).usage.cached_prompt_tokens == 0


def test_weights_are_read_by_those_who_may(alice: Tenant, make: Make, operation: str) -> None:
    bundle = alice.bundles.get_bundle("alices")
    weights = max(bundle.blobs, key=lambda blob: blob.size_bytes)
    reader, runtime = make("reader", "read"), make("host", "load")
    bound = make("bound", "read", bundles=["alices"])

    def read(tenant: Tenant, ref: str = "", digest: str = weights.digest) -> int:
        with tenant.bundles.read_blob(digest, ref=ref) as responses:
            return sum(len(response.data) for response in responses)

    with refused(PermissionDenied, "SCOPE_MISSING"):
        read(alice)
    for tenant, ref in ((reader, ""), (runtime, ""), (bound, "alices:v1"), (bound, "alices")):
        assert read(tenant, ref) == weights.size_bytes
    for ref in ("", "private", bundle.digest):
        with refused(PermissionDenied, "BUNDLE_FORBIDDEN"):
            read(bound, ref)
    # Of another bundle, whose name no pattern of the token admits.
    alice.compiler.shard_weights("private", str(TINY), "alices:v1")
    blobs = {blob.digest for blob in alice.bundles.get_bundle("private").blobs}
    foreign = min(blobs - {blob.digest for blob in bundle.blobs})
    with refused(NotFound, "BLOB_NOT_FOUND"):
        read(bound, "alices", digest=foreign)
    assert read(reader, "private", digest=foreign)


@pytest.mark.parametrize("dots", [".", ".."])
def test_dots_are_no_ids(stack: Stack, alice: Tenant, shared: str, dots: str) -> None:
    error = stack.kiln("load", "alices", "--deployment", dots, check=False).last["error"]
    assert (error["code"], error["fields"][0]["field"]) == ("INVALID_ARGUMENT", "deployment_id")
    for field in ("request_id", "session_id"):
        options = cast("Any", {field: dots})
        with pytest.raises(InvalidArgument) as caught:
            alice.runtime.complete(shared, PROMPT, max_new_tokens=1, **options)
        assert [one.field for one in caught.value.fields] == [field]
