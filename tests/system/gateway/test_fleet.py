"""Runtimes behind SMG that are killed, restarted one after the other, and given other weights."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.servers.stack import Stack
from tests.system.conftest import PIRATE
from tests.system.gateway.conftest import MESSAGES, MODEL, Fleet, answer
from tests.system.runtime_process import SMALL_CONFIG, wait_until

pytestmark = pytest.mark.slow

#: Seconds in which a question gets its answer while a runtime is missing; 0.1 s on an idle host.
MAX_ANSWER_S = 10.0


def stream_long(fleet: Fleet) -> bool:
    """Asks for as many tokens as the cache holds; whether the answer came to its end, and not to an error."""
    options = {"max_tokens": 240, "extra_body": {"ignore_eos": True}, "stream": True}
    reasons = []
    with fleet.client() as client:
        try:
            for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, **options):  # type: ignore[call-overload]
                reasons += [choice.finish_reason for choice in chunk.choices]
        except openai.APIError:
            return False
    assert reasons[-1] == "length", "a stream that ends without an error is whole"
    return True


def test_killed_runtime_ends_its_streams_and_no_others(fleet: Fleet) -> None:
    victim, survivor = fleet.runtimes
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream_long, fleet) for _ in range(8)]
        wait_until(lambda: all(one.get(MODEL).load.used_slots == 4 for one in fleet.runtimes))
        address = victim.address
        victim.kill()
        started_s = time.monotonic()
        with fleet.client() as client:
            for number in range(20):
                assert answer(client, stream=number % 2 == 0, max_tokens=4)
                assert time.monotonic() - started_s < MAX_ANSWER_S
                started_s = time.monotonic()
        outcomes = [stream.result() for stream in streams]
    assert 1 <= outcomes.count(False) <= 4, "those of the killed runtime that had not ended, and no others"
    wait_until(lambda: survivor.get(MODEL).load.used_slots == 0)
    with fleet.under_load() as load:
        victim.start(f"--address={address}")
        victim.wait_for("READY", deployment_id=MODEL)
        fleet.wait_until_routed(victim)
    assert load.failures == []
    fleet.wait_until_whole()


def restart(fleet: Fleet, number: int) -> None:
    """Asks a runtime to end, waits until its requests have, and starts it again at its address."""
    runtime = fleet.runtimes[number]
    address = runtime.address
    runtime.stop()
    runtime.start(f"--address={address}")
    runtime.wait_for("READY", deployment_id=MODEL)
    fleet.wait_until_routed(runtime)


def test_rolling_restart_fails_no_request(fleet: Fleet) -> None:
    with fleet.under_load() as load:
        for _ in range(4):
            for number in range(len(fleet.runtimes)):
                restart(fleet, number)
    assert load.failures == []
    assert len(load.seconds) > 20
    assert max(load.seconds) < MAX_ANSWER_S
    fleet.wait_until_whole()


def test_weight_swaps_fail_no_request(stack: Stack, fleet: Fleet) -> None:
    story = fleet.runtimes[0].get(MODEL).roles[0].bundle_digest
    pirate = stack.provide("gateway-pirate", PIRATE, SMALL_CONFIG)
    with fleet.client() as client:
        before = answer(client, stream=False, max_tokens=16, temperature=0)
        with fleet.under_load() as load:
            for _ in range(8):
                for digest in (pirate, story):
                    for runtime in fleet.runtimes:
                        runtime.load_weights(digest, MODEL)
                        num_answers = len(load.texts)
                        wait_until(lambda n=num_answers: len(load.texts) > n + 8)  # type: ignore[misc]
        assert load.failures == []
        assert before in load.texts
        assert len(set(load.texts)) > 1, "the other weights answer otherwise"
        assert answer(client, stream=False, max_tokens=16, temperature=0) == before


def test_a_full_runtime_makes_requests_wait(fleet: Fleet) -> None:
    """More requests than slots queue in the runtimes: none is refused."""
    with fleet.client() as client, ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(answer, client, stream=True, max_tokens=8, temperature=0) for _ in range(24)]
        assert len({one.result() for one in asked}) == 1
