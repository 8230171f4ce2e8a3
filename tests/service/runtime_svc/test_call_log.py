"""The line of a finished call says which deployment, how many tokens, how soon, and why it was refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from tests.hang_guard import HANG_S
from tests.servers.runtime import Runtime, raises, token_request

Logs = list[dict[str, Any]]


@pytest.fixture
def logs() -> Iterator[Logs]:
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured


def call_of(logs: Logs, method: str) -> dict[str, Any]:
    (line,) = [log for log in logs if log["event"] == "call" and log["method"].endswith(f"/{method}")]
    return line


async def test_a_generation(served: Runtime, logs: Logs) -> None:
    await served.deploy()
    served.ranks.step_s = 0.02
    await served.generate([5, 6], 4)
    assert call_of(logs, "LoadBundle")["deployment_id"] == "d"
    line = call_of(logs, "Generate")
    assert (line["code"], line["deployment_id"], line["finish_reason"]) == ("OK", "d", "LENGTH")
    assert (line["prompt_tokens"], line["generated_tokens"]) == (2, 4)
    assert 0.02 <= line["ttft_s"] < line["duration_s"]


async def test_a_generation_whose_client_leaves(served: Runtime, logs: Logs) -> None:
    await served.deploy()
    served.ranks.step_s = 0.01
    call = served.generation.Generate(token_request([5, 6], 90))
    events = aiter(call)
    for _ in range(3):
        await anext(events)
    call.cancel()
    await served.wait_for_slots(0)
    async with asyncio.timeout(HANG_S):
        while not any(log.get("method", "").endswith("/Generate") for log in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    line = call_of(logs, "Generate")
    assert (line["code"], line["finish_reason"]) == ("CANCELLED", "ABORTED")
    assert 2 <= line["generated_tokens"] < 90
    assert line["ttft_s"] > 0


async def test_a_refusal(served: Runtime, logs: Logs) -> None:
    await served.deploy()
    async with raises("INVALID_ARGUMENT", "REQUEST_INVALID"):
        await served.generate([999_999])
    line = call_of(logs, "Generate")
    assert (line["code"], line["deployment_id"], line["reason"]) == ("INVALID_ARGUMENT", "d", "REQUEST_INVALID")
    assert "999999" in line["message"]
    assert "generated_tokens" not in line


async def test_an_unknown_deployment(served: Runtime, logs: Logs) -> None:
    async with raises("NOT_FOUND", "DEPLOYMENT_NOT_FOUND"):
        await served.generate([5], deployment_id="none")
    line = call_of(logs, "Generate")
    assert (line["deployment_id"], line["reason"]) == ("none", "DEPLOYMENT_NOT_FOUND")
