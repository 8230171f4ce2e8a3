"""A trace goes from the client through the front to the queue and the steps."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import pytest
from kiln.runtime.v1 import runtime_pb2 as pb

from edge.errors import TracingUnavailable
from tests.hang_guard import until
from tests.servers.logs import Logs, finished_calls
from tests.servers.refusals import refused
from tests.servers.runtime import Metadata, Runtime, serve_runtime, token_request
from tests.servers.traces import CLIENT_SPAN_ID, TRACE_ID, TRACED, UNSAMPLED, collect_traces

GENERATE = "kiln.runtime.v1.GenerationService/Generate"
ERROR = 2


async def generate(served: Runtime, metadata: Metadata, **options: str) -> None:
    await served.ask(token_request([5, 6], 4, **options), metadata)


async def test_a_generation_from_the_client_to_its_steps(tmp_path: Path, logs: Logs) -> None:
    with collect_traces() as collector:
        async with serve_runtime(tmp_path, f"--trace-endpoint={collector.endpoint}") as served:
            await served.deploy()
            served.ranks.step_s = 0.01
            await generate(served, TRACED)
        call = collector.find(GENERATE)
        assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE_ID, CLIENT_SPAN_ID)
        assert collector.children(call) == ["queue", "prefill steps", "decode steps"]
        queue, prefill, decode = map(collector.find, ("queue", "prefill steps", "decode steps"))
        assert call.start_time_unix_nano <= queue.start_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert decode.end_time_unix_nano <= call.end_time_unix_nano
        counts = [{one.key: one.value.int_value for one in span.attributes} for span in (prefill, decode)]
        assert counts[0] == {"kiln.steps": 1, "kiln.prompt_tokens": 2}
        assert counts[1] == {"kiln.steps": 3, "kiln.generated_tokens": 4}
        assert collector.services == {"kiln-runtime"}
    (line,) = await finished_calls(logs, "/Generate")
    assert line["trace_id"] == TRACE_ID


async def test_faults_of_the_server_are_errors_and_mistakes_of_callers_are_not(tmp_path: Path) -> None:
    with collect_traces() as collector:
        async with serve_runtime(tmp_path, f"--trace-endpoint={collector.endpoint}") as served:
            await refused(generate(served, TRACED, deployment_id="none"), "NOT_FOUND", "DEPLOYMENT_NOT_FOUND")
            await served.deploy()
            served.server.deployments._is_shutting_down = True
            await refused(generate(served, TRACED), "UNAVAILABLE", "SHUTTING_DOWN")
        calls = [span for span in collector.spans if span.name == GENERATE]
        assert [span.status.code == ERROR for span in calls] == [False, True]
        codes = [{one.key: one.value.int_value for one in span.attributes}["rpc.grpc.status_code"] for span in calls]
        assert codes == [5, 14]


async def test_a_missed_deadline_is_no_cancellation(tmp_path: Path, logs: Logs) -> None:
    with collect_traces() as collector:
        async with serve_runtime(tmp_path, f"--trace-endpoint={collector.endpoint}") as served:
            await served.deploy()
            served.ranks.gate.clear()
            stream = asyncio.create_task(generate(served, UNSAMPLED))
            await served.wait_for_slots(1)
            request = pb.ResetKVCacheRequest(deployment_id="d")
            with pytest.raises(grpc.aio.AioRpcError):
                await served.control.ResetKVCache(request, timeout=0.2, metadata=TRACED)
            # The server may notice later than the client, and the call must not succeed meanwhile.
            await until(lambda: any(log.get("method", "").endswith("/ResetKVCache") for log in logs))
            served.ranks.gate.set()
            await stream
        reset = collector.find("kiln.runtime.v1.RuntimeService/ResetKVCache")
        assert {one.key: one.value.int_value for one in reset.attributes}["rpc.grpc.status_code"] == 4
        assert reset.status.code == ERROR


async def test_the_client_decides_what_is_sampled(tmp_path: Path) -> None:
    with collect_traces() as collector:
        async with serve_runtime(tmp_path, f"--trace-endpoint={collector.endpoint}") as served:
            await served.deploy()
            await generate(served, UNSAMPLED)
        assert [span.name for span in collector.spans] == ["kiln.runtime.v1.RuntimeService/LoadBundle"]


async def test_a_collector_that_is_away_costs_no_call(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--trace-endpoint=http://127.0.0.1:9/v1/traces") as served:
        await served.deploy()
        await generate(served, TRACED)


async def test_without_the_extra_the_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingUnavailable, match=r"pip install 'kiln-runtime\[tracing\]'"):
        async with serve_runtime(tmp_path, "--trace-endpoint=http://127.0.0.1:9/v1/traces"):
            pass
