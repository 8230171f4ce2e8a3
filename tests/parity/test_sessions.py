"""Sessions over a cache of blocks with prefix caching, on compiled ranks, beside transformers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import grpc
import pytest
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.parity.bundles import Bundles
from tests.parity.reference import Reference, assert_same_tokens, draw_prompt
from tests.processes import descendants, is_rank
from tests.servers.stack import Stack, token_request, tokens_of

CONFIG = {
    "neuron_config": {
        "tp_degree": 1,
        "seq_len": 64,
        "max_context_length": 32,
        "batch_size": 2,
        "torch_dtype": "float32",
        "enable_bucketing": True,
        "context_encoding_buckets": [16, 32],
        "token_generation_buckets": [64],
        "is_continuous_batching": True,
        "ctx_batch_size": 1,
        "is_block_kv_layout": True,
        "is_prefix_caching": True,
        "pa_num_blocks": 12,
        "pa_block_size": 8,
        "on_device_sampling_config": {"global_topk": 32, "dynamic": True},
    }
}


@pytest.fixture(scope="module")
def deployment(stack: Stack, bundles: Bundles) -> Iterator[str]:
    model = bundles.reference("gqa2-tied-linear").path
    stack.compile("sessions", model, CONFIG)
    stack.kiln("load", "sessions", "--deployment", "sessions")
    yield "sessions"
    stack.kiln("unload", "sessions")


class Conversation:
    """Turns of one session, each compared with transformers'."""

    def __init__(self, stack: Stack, deployment: str, reference: Reference, session_id: str) -> None:
        self._stack = stack
        self._deployment = deployment
        self._reference = reference
        self.session_id = session_id

    def ask(self, prompt: list[int], count: int = 8) -> tuple[int, list[int]]:
        """Generates; returns the tokens of the prompt that the cache had, and the sequence."""
        request = token_request(self._deployment, prompt, count, temperature=0.0)
        request.session_id = self.session_id
        events = [*self._stack.generation().Generate(request)]
        tokens = tokens_of(events)
        assert_same_tokens(tokens, self._reference.greedy(prompt, count))
        return events[-1].finished.usage.cached_prompt_tokens, [*prompt, *tokens]

    def list_held(self) -> dict[str, int]:
        request = runtime.ListSessionsRequest(deployment_id=self._deployment)
        sessions = self._stack.runtime_service().ListSessions(request).sessions
        return {session.id: session.held_tokens for session in sessions}


@pytest.fixture
def conversation(request: pytest.FixtureRequest, stack: Stack, deployment: str, bundles: Bundles) -> Conversation:
    return Conversation(stack, deployment, bundles.reference("gqa2-tied-linear"), request.node.name)


def test_turns_go_on_behind_what_the_session_holds(conversation: Conversation) -> None:
    num_cached, sequence = conversation.ask(draw_prompt(11))
    assert num_cached == 0
    num_cached, sequence = conversation.ask([*sequence, *draw_prompt(3)])
    assert num_cached == 18, "in part of a block"
    num_cached, _ = conversation.ask([*sequence[:21], *draw_prompt(5)])
    assert num_cached == 16, "a full block is not written again"


def test_requests_take_the_room_of_a_session_that_then_computes_its_turn_anew(
    conversation: Conversation, stack: Stack
) -> None:
    """12 blocks, and two sequences of 6."""
    _, sequence = conversation.ask(draw_prompt(12, seed=1))
    assert conversation.list_held()[conversation.session_id] == 19
    requests = [token_request("sessions", draw_prompt(16, seed=seed), 32, temperature=0.0) for seed in (2, 3)]
    streams = [stack.generation().Generate(request) for request in requests]
    assert [len(tokens_of([*stream])) for stream in streams] == [32, 32]
    assert conversation.list_held()[conversation.session_id] == 0
    assert conversation.ask([*sequence, 9])[0] in {0, 8}


def test_a_killed_rank_costs_a_session_its_cache_and_no_answer(conversation: Conversation, stack: Stack) -> None:
    _, sequence = conversation.ask(draw_prompt(10, seed=4))
    for rank in filter(is_rank, descendants(stack.process.pid)):
        os.kill(rank.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while True:
        try:
            num_cached, sequence = conversation.ask([*sequence, 7])
            break
        except grpc.RpcError:
            # It came before the loss was known.
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    assert num_cached == 0
    assert conversation.ask([*sequence, 8], 4)[0] == 26


def test_a_reset_of_a_session_zeroes_its_blocks(conversation: Conversation, stack: Stack) -> None:
    _, sequence = conversation.ask(draw_prompt(10, seed=5))
    assert conversation.list_held()[conversation.session_id] == 17
    scope = runtime.SessionScope(session_id=conversation.session_id)
    request = runtime.ResetKVCacheRequest(deployment_id="sessions", session=scope)
    receipt = stack.runtime_service().ResetKVCache(request)
    assert receipt.freed_blocks == 3
    assert receipt.zeroed_bytes > 0
    assert conversation.session_id not in conversation.list_held()
    assert conversation.ask([*sequence, 9])[0] == 0
