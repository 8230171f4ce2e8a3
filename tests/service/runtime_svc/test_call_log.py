"""The line of a finished call says which deployment, how many tokens, how soon, and why it was refused."""

from __future__ import annotations

from tests.servers.logs import Logs, finished_calls
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, token_request


async def test_a_generation(served: Runtime, logs: Logs) -> None:
    await served.deploy()
    served.ranks.step_s = 0.02
    await served.generate([5, 6], 4)
    (load,) = await finished_calls(logs, "LoadBundle")
    assert load["deployment_id"] == "d"
    (line,) = await finished_calls(logs, "/Generate")
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
    (line,) = await finished_calls(logs, "/Generate")
    assert (line["code"], line["finish_reason"]) == ("CANCELLED", "ABORTED")
    assert 2 <= line["generated_tokens"] < 90
    assert line["ttft_s"] > 0


async def test_a_refusal(served: Runtime, logs: Logs) -> None:
    await refused(served.generate([5], deployment_id="none"), "NOT_FOUND", "DEPLOYMENT_NOT_FOUND")
    (line,) = await finished_calls(logs, "/Generate")
    assert (line["deployment_id"], line["reason"]) == ("none", "DEPLOYMENT_NOT_FOUND")
    await served.deploy()
    logs.clear()
    await refused(served.generate([999_999]), "INVALID_ARGUMENT", "REQUEST_INVALID")
    (line,) = await finished_calls(logs, "/Generate")
    assert (line["code"], line["deployment_id"], line["reason"]) == ("INVALID_ARGUMENT", "d", "REQUEST_INVALID")
    assert "999999" in line["message"]
    assert "generated_tokens" not in line
