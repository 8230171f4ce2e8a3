"""`kiln load`, `unload`, `status`, `load-weights` and `reset-kv`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration
from kiln.runtime.v1 import runtime_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]


@pytest.fixture
def loading(server: ScriptedServer) -> ScriptedServer:
    progress = [samples.load_progress("RESOLVE"), samples.load_progress("VERIFY", 1_000_000, 4_000_000)]
    events = [runtime_pb2.LoadBundleResponse(progress=event) for event in progress]
    server.script("LoadBundle", [*events, runtime_pb2.LoadBundleResponse(deployment=samples.deployment())])
    return server


def test_load(loading: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("load", "tiny", "--deployment", "demo", "--cores", "0,1", "--json")
    assert [line["event"] for line in outcome.lines] == ["progress", "progress", "result"]
    assert outcome.lines[1] == {
        "event": "progress",
        "stage": "verify",
        "done_bytes": 1_000_000,
        "total_bytes": 4_000_000,
    }
    assert (outcome.last["id"], outcome.last["state"]) == ("demo", "ready")
    assert outcome.last["roles"][0]["weight_epoch"] == 1
    request = runtime_pb2.LoadBundleRequest(ref="tiny", deployment_id="demo", cores=[0, 1])
    assert loading.requests["LoadBundle"] == [request]


def test_load_for_a_person(loading: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("load", "tiny", "--deployment", "demo")
    assert outcome.err.splitlines() == ["resolve", "verify 1.0 MB/4.0 MB"]
    assert "demo" in outcome.out
    assert f"tiny:v3 with weights of tiny:v3 ({samples.DIGEST}), epoch 1" in outcome.out
    assert loading.requests["LoadBundle"][0].cores == []


def test_load_with_threads_and_a_followed_alias(loading: ScriptedServer, kiln: Kiln) -> None:
    kiln("load", "tiny@prod", "--deployment", "demo", "--threads-per-core", "4", "--follow-alias")
    assert loading.requests["LoadBundle"] == [
        runtime_pb2.LoadBundleRequest(ref="tiny@prod", deployment_id="demo", threads_per_core=4, follow_alias=True)
    ]


def test_load_with_a_time_between_tokens(loading: ScriptedServer, kiln: Kiln) -> None:
    deployment = samples.deployment(target_inter_token_latency=Duration(nanos=250_000_000))
    loading.script("LoadBundle", [runtime_pb2.LoadBundleResponse(deployment=deployment)])
    outcome = kiln("load", "tiny", "--deployment", "demo", "--target-inter-token-latency", "0.25")
    assert "for 0.25 s between two tokens" in outcome.out
    (request,) = loading.requests["LoadBundle"]
    assert request.target_inter_token_latency == Duration(nanos=250_000_000)
    assert kiln("load", "tiny", "--deployment", "demo", "--target-inter-token-latency", "0").exit_code == 2
    loading.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=samples.deployment()))
    assert "between two tokens" not in kiln("status", "demo").out


def test_deployment_that_awaits_its_weights(server: ScriptedServer, kiln: Kiln) -> None:
    waiting = samples.deployment()
    waiting.state = runtime_pb2.Deployment.STATE_AWAITING_WEIGHTS
    waiting.roles[0].weight_epoch = 0
    waiting.roles[0].weights_ref = ""
    server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=waiting))
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse())
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=[waiting]))
    assert kiln("status", "demo", "--json").last["state"] == "awaiting_weights"
    shown = kiln("status", "demo").out
    assert "awaiting_weights" in shown
    assert "tiny:v3, waiting for weights: kiln load-weights demo REF" in shown
    assert "none yet" in kiln("status").out


def test_followed_alias_is_shown_with_what_is_wrong(server: ScriptedServer, kiln: Kiln) -> None:
    following = samples.deployment(followed_alias="tiny@prod")
    server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=following))
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse())
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=[following]))
    listed = kiln("status").out
    assert f"tiny:v3 ({samples.DIGEST[:19]}), following tiny@prod" in listed
    assert "degraded" not in listed
    assert "tiny@prod\n" in kiln("status", "demo").out
    following.roles[0].weights_ref = "tiny@prod"
    following.roles[0].weights_version = "tiny:v2"
    following.degraded = True
    following.followed_version, following.followed_digest = "tiny:v4", "sha256:" + "b" * 64
    following.follow_message = "tiny:v4 has another graph"
    server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=following))
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=[following]))
    listed = kiln("status").out
    assert "ready, degraded" in listed
    assert f"tiny:v2 ({samples.DIGEST[:19]}), following tiny@prod" in listed
    assert "demo: tiny@prod is not followed: tiny:v4 has another graph" in listed
    shown = kiln("status", "demo").out
    assert "ready, degraded" in shown
    assert f"with weights of tiny:v2 ({samples.DIGEST}), epoch 1" in shown
    assert f"tiny@prod, which names tiny:v4 (sha256:{'b' * 64}): tiny:v4 has another graph" in shown


def test_load_that_fails_halfway(server: ScriptedServer, kiln: Kiln) -> None:
    progress = runtime_pb2.LoadBundleResponse(progress=samples.load_progress("VERIFY"))
    server.script("LoadBundle", [progress, refusal("DATA_LOSS", "BLOB_CORRUPT", "blob x is corrupt", digest="x")])
    outcome = kiln("load", "tiny", "--deployment", "demo", "--json")
    assert (outcome.exit_code, outcome.error["code"], outcome.error["reason"]) == (1, "DATA_LOSS", "BLOB_CORRUPT")
    assert outcome.lines[0]["event"] == "progress"


def test_load_that_ends_silently(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("LoadBundle", [runtime_pb2.LoadBundleResponse(progress=samples.load_progress("VERIFY"))])
    assert kiln("load", "tiny", "--deployment", "demo", "--json").error["reason"] == "STREAM_INCOMPLETE"


def test_unload(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("UnloadBundle", runtime_pb2.UnloadBundleResponse(aborted_requests=2))
    assert kiln("unload", "demo", "--json").last == {"deployment_id": "demo", "aborted_requests": 2}
    assert kiln("unload", "demo", "--in-flight", "refuse").out == "unloaded demo, 2 requests aborted\n"
    assert [request.in_flight_policy for request in server.requests["UnloadBundle"]] == [
        runtime_pb2.IN_FLIGHT_POLICY_UNSPECIFIED,
        runtime_pb2.IN_FLIGHT_POLICY_REFUSE,
    ]


def test_status(server: ScriptedServer, kiln: Kiln) -> None:
    info = runtime_pb2.GetServerInfoResponse(
        version="0.1.0",
        schema_revision=1,
        target="cpu",
        isas=["x86-64-v3"],
        total_cores=8,
        free_cores=7,
        total_memory_bytes=8_000_000,
        free_memory_bytes=3_000_000,
    )
    server.script("GetServerInfo", info)
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=[samples.deployment()]))
    record = kiln("status", "--json").last
    assert record["server"]["free_cores"] == 7
    assert [deployment["id"] for deployment in record["deployments"]] == ["demo"]
    shown = kiln("status").out
    assert "7 of 8 free" in shown
    assert "3.0 MB of 8.0 MB free" in shown
    assert "demo" in shown
    failed = samples.deployment()
    failed.message = "deployment 'demo' is quarantined"
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=[failed]))
    assert "demo: deployment 'demo' is quarantined" in kiln("status").out
    server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse())
    assert kiln("status", "--json").last["deployments"] == []
    assert "no deployments" in kiln("status").out


def test_status_counts_the_blocks_of_the_kv_cache(server: ScriptedServer, kiln: Kiln) -> None:
    deployment = samples.deployment()
    deployment.capabilities.prefix_caching = False
    deployment.load.MergeFrom(
        runtime_pb2.Load(
            used_slots=1,
            total_slots=2,
            used_blocks=1,
            total_blocks=2,
            block_tokens=256,
            used_tokens=57,
            queued_tokens=9,
        )
    )
    server.script("GetServerInfo", runtime_pb2.GetServerInfoResponse())

    def show() -> tuple[str, str]:
        server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=deployment))
        server.script("ListDeployments", runtime_pb2.ListDeploymentsResponse(deployments=[deployment]))
        return kiln("status", "demo").out, kiln("status").out

    one, listed = show()
    assert "1/2 blocks of 256 tokens, 57 tokens held, 9 queued" in one
    assert "blocks" not in listed, "its blocks are its slots"
    assert "prefix cache" not in one
    deployment.capabilities.prefix_caching = True
    assert "prefix cache" in show()[0]
    deployment.load.total_blocks = 64
    assert "1/64" in show()[1]
    deployment.load.ClearField("total_blocks")
    one, listed = show()
    assert "blocks" not in one + listed, "an earlier server counts none"


def test_status_tells_what_a_request_may_ask(server: ScriptedServer, kiln: Kiln) -> None:
    deployment = samples.deployment()
    deployment.capabilities.MergeFrom(
        runtime_pb2.Capabilities(
            text=True,
            logprobs=True,
            max_logprobs=20,
            logits=True,
            max_num_sequences=4,
            input_truncation=True,
            padding_side="left",
            submodels=[
                runtime_pb2.SubmodelBuckets(submodel="context_encoding", batch_size=1, tokens=[64, 128]),
                runtime_pb2.SubmodelBuckets(submodel="token_generation", batch_size=2, tokens=[256]),
            ],
        )
    )
    server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=deployment))
    record = kiln("status", "demo", "--json").last["capabilities"]
    assert (record["logits"], record["padding_side"], record["submodels"][0]["tokens"]) == (True, "left", [64, 128])
    lines = {tuple(line.split(maxsplit=1)) for line in kiln("status", "demo").out.splitlines()}
    assert {
        ("prompts", "text, token ids; what is too long is cut"),
        ("outputs", "up to 4 sequences of a prompt, logprobs up to 20, logits"),
        ("context_encoding", "64, 128 tokens, batch 1, left padded"),
        ("token_generation", "256 tokens, batch 2"),
    } <= lines


def test_status_of_one(server: ScriptedServer, kiln: Kiln) -> None:
    failed = samples.deployment(message="rank 0 [died]")
    server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=failed))
    record = kiln("status", "demo", "--json").last
    assert (record["id"], record["message"], record["kv_bytes"]) == ("demo", "rank 0 [died]", 1_000_000)
    shown = kiln("status", "demo").out
    assert "token ids; what is too long is refused" in shown
    assert "tokens only" in shown
    assert "rank 0 [died]" in shown
    assert "0, 2 threads each" in shown
    assert server.requests["GetDeployment"][0].deployment_id == "demo"
    server.script("GetDeployment", refusal("NOT_FOUND", "DEPLOYMENT_NOT_FOUND", "no deployment 'x'"))
    assert kiln("status", "x", "--json").error["reason"] == "DEPLOYMENT_NOT_FOUND"


@pytest.fixture
def swapping(server: ScriptedServer) -> ScriptedServer:
    result = runtime_pb2.LoadWeightsResult(
        deployment=samples.deployment(),
        previous_weight_epoch=1,
        weight_epoch=2,
        aborted_requests=1,
        pause_duration=samples.seconds(0.004),
    )
    progress = runtime_pb2.LoadWeightsResponse(progress=samples.load_progress("SWAP"))
    server.script("LoadWeights", [progress, runtime_pb2.LoadWeightsResponse(result=result)])
    return server


def test_load_weights(swapping: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("load-weights", "demo", "pirate", "--json")
    assert [line["event"] for line in outcome.lines] == ["progress", "result"]
    assert outcome.lines[0]["stage"] == "swap"
    last = outcome.last
    assert (last["previous_weight_epoch"], last["weight_epoch"], last["aborted_requests"]) == (1, 2, 1)
    assert last["pause_seconds"] == 0.004
    assert last["deployment"]["id"] == "demo"
    request = runtime_pb2.LoadWeightsRequest(deployment_id="demo", ref="pirate")
    assert swapping.requests["LoadWeights"] == [request]


def test_load_weights_with_policies(swapping: ScriptedServer, kiln: Kiln) -> None:
    shown = kiln("load-weights", "demo", "pirate", "--in-flight", "continue", "--kv", "keep", "--role", "target").out
    assert "1 → 2" in shown
    assert "4.0 ms" in shown
    assert swapping.requests["LoadWeights"] == [
        runtime_pb2.LoadWeightsRequest(
            deployment_id="demo",
            ref="pirate",
            role=runtime_pb2.ROLE_TARGET,
            in_flight_policy=runtime_pb2.IN_FLIGHT_POLICY_CONTINUE,
            kv_policy=runtime_pb2.KV_POLICY_KEEP,
        )
    ]


def test_weights_that_do_not_fit(server: ScriptedServer, kiln: Kiln) -> None:
    answer = [refusal("FAILED_PRECONDITION", "GRAPH_ABI_MISMATCH", "other graph", expected="a", actual="b")]
    server.script("LoadWeights", answer)
    outcome = kiln("load-weights", "demo", "other", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "GRAPH_ABI_MISMATCH")
    assert outcome.error["metadata"] == {"expected": "a", "actual": "b"}


def test_reset_kv(server: ScriptedServer, kiln: Kiln) -> None:
    receipt = runtime_pb2.ResetKVCacheResponse(
        affected_sequences=2,
        freed_slots=2,
        zeroed_bytes=1_000_000,
        weight_epoch=3,
        duration=samples.seconds(0.25),
        freed_blocks=1,
    )
    server.script("ResetKVCache", receipt)
    assert kiln("reset-kv", "demo", "--json").last == {
        "deployment_id": "demo",
        "affected_sequences": 2,
        "freed_slots": 2,
        "zeroed_bytes": 1_000_000,
        "weight_epoch": 3,
        "seconds": 0.25,
        "freed_blocks": 1,
    }
    assert "1000000 bytes" in kiln("reset-kv", "demo", "--in-flight", "abort").out
    assert server.requests["ResetKVCache"][1].in_flight_policy == runtime_pb2.IN_FLIGHT_POLICY_ABORT
    assert kiln("reset-kv", "demo", "--prefix-cache").exit_code == 0
    assert kiln("reset-kv", "demo", "--session", "s").exit_code == 0
    scopes = [request.WhichOneof("scope") for request in server.requests["ResetKVCache"]]
    assert scopes == [None, None, "prefix_cache", "session"]
    assert server.requests["ResetKVCache"][3].session.session_id == "s"
    assert kiln("reset-kv", "demo", "--session", "s", "--prefix-cache").exit_code == 2


def test_sessions(server: ScriptedServer, kiln: Kiln) -> None:
    used = runtime_pb2.Session(id="used", held_tokens=7, running=True)
    idle = runtime_pb2.Session(id="idle", held_tokens=17)
    idle.last_use_time.FromSeconds(1_800_000_000)
    idle.expire_time.FromSeconds(1_800_000_060)
    server.script("ListSessions", runtime_pb2.ListSessionsResponse(sessions=[idle, used]))
    record = kiln("sessions", "demo", "--json").last
    assert [(one["id"], one["held_tokens"], one["running"]) for one in record["sessions"]] == [
        ("idle", 17, False),
        ("used", 7, True),
    ]
    assert record["sessions"][0]["expire_time"] == "2027-01-15T08:01:00Z"
    shown = kiln("sessions", "demo").out
    assert "2027-01-15 08:01:00" in shown
    assert "in use" in shown
    server.script("ListSessions", runtime_pb2.ListSessionsResponse())
    assert "no sessions" in kiln("sessions", "demo").out
