"""Admission on anything that a client can send: a sound request, or a named error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kiln.runtime.v1 import generation_pb2 as pb

from bundle.manifest import Tokenizer
from execution.text.prompt import TokenPrompt
from runtime_svc.admission.calls import GenerationCall, admit, check_call
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.api.generation_wire import call_from_pb
from runtime_svc.engine.request import Request
from runtime_svc.errors import FeatureNotServed, PromptTooLong, RequestInvalid, RuntimeServiceError
from tests.ranks.fakes import DIGEST, GREEDY, VOCAB_SIZE, make_manifest

TOKENIZER = Tokenizer(digest=DIGEST, files=(), chat_template="x")
CAPABILITIES = [
    Capabilities.from_manifest(make_manifest(tokenizer=TOKENIZER)),
    Capabilities.from_manifest(make_manifest(sampling=GREEDY, flags=("tokens",), max_new_tokens=3)),
]

INT32 = st.integers(-(2**31), 2**31 - 1)
TOKEN_IDS = st.lists(st.integers(-1, VOCAB_SIZE), max_size=20)


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """Any Generate request, often a sound one."""
    request = pb.GenerateRequest(request_id=draw(st.text(max_size=200) | st.sampled_from(["", "mine"])))
    kind = draw(st.sampled_from(["none", "text", "chat", "token_ids", "token_ids"]))
    if kind == "text":
        request.text = draw(st.text(max_size=10))
    elif kind == "chat":
        request.chat.messages.extend(
            pb.ChatMessage(role=role) for role in draw(st.lists(st.text(max_size=3), max_size=3))
        )
    elif kind == "token_ids":
        request.token_ids.ids.extend(draw(TOKEN_IDS))
    for message, field, values in (
        (request.sampling, "temperature", st.floats(width=32) | st.sampled_from([0.0, 1.0])),
        (request.sampling, "top_k", INT32 | st.integers(0, 60)),
        (request.sampling, "top_p", st.floats(width=32) | st.sampled_from([0.5, 1.0])),
        (request.sampling, "seed", st.integers(0, 2**64 - 1)),
        (request.stop, "max_new_tokens", INT32 | st.integers(1, 100)),
        (request.stop, "ignore_eos", st.booleans()),
        (request.output, "logprobs", INT32 | st.integers(0, 20)),
        (request, "num_sequences", INT32 | st.integers(1, 16)),
    ):
        if draw(st.booleans()):
            setattr(message, field, draw(values))
    request.stop.stop_strings.extend(draw(st.lists(st.text(max_size=300), max_size=18)))
    request.stop.stop_token_ids.extend(draw(TOKEN_IDS))
    return request


def validate(call: GenerationCall, capabilities: Capabilities) -> tuple[Request, ...] | RuntimeServiceError:
    """The requests of the sequences, or why there are none."""
    try:
        check_call(call, capabilities)
        token_ids = call.prompt.token_ids if isinstance(call.prompt, TokenPrompt) else [5] * 3
        return admit(call, token_ids, capabilities, now_s=0.0)
    except (RequestInvalid, FeatureNotServed, PromptTooLong) as error:
        return error


@given(requests(), st.sampled_from(CAPABILITIES))
def test_anything_is_admitted_or_refused_by_name(request_: pb.GenerateRequest, capabilities: Capabilities) -> None:
    call = call_from_pb(request_, request_id=request_.request_id or "made")
    outcome = validate(call, capabilities)
    if not isinstance(outcome, tuple):
        assert outcome.violations
        assert all(violation.field and violation.accepted for violation in outcome.violations)
        return
    assert len(outcome) == call.num_sequences <= capabilities.max_num_sequences
    request = outcome[0]
    assert request.request_id == (request_.request_id or "made")
    assert request.request_id.isascii()
    assert 1 <= request.num_tokens <= capabilities.max_context_length
    assert 1 <= request.stop.max_new_tokens <= capabilities.max_length - request.num_tokens
    assert request.sampling.temperature >= 0
    assert 0 <= request.sampling.top_k <= capabilities.max_top_k
    assert 0 < request.sampling.top_p <= 1
    assert 0 <= request.sampling.seed < 2**64
    assert all(0 <= token_id < VOCAB_SIZE for token_id in request.stop.stop_token_ids)
    assert set(capabilities.eos_token_ids) <= request.stop.stop_token_ids or call.ignore_eos


def test_prompt_of_the_largest_bucket_leaves_room_for_a_token() -> None:
    assert Capabilities.from_manifest(make_manifest(prompt_buckets=(64,), token_buckets=(64,))).max_context_length == 63
    assert Capabilities.from_manifest(make_manifest(prompt_buckets=(16,), token_buckets=(64,))).max_context_length == 16


def test_salt_is_bounded_and_reaches_the_request() -> None:
    prompt = TokenPrompt((5,))
    check_call(GenerationCall("a", prompt, cache_salt="s" * 256), CAPABILITIES[0])
    with pytest.raises(RequestInvalid) as caught:
        check_call(GenerationCall("a", prompt, cache_salt="s" * 257), CAPABILITIES[0])
    assert [(one.field, one.value) for one in caught.value.violations] == [("cache_salt", "257 characters")]
    assert admit(GenerationCall("a", prompt, cache_salt="s"), [5], CAPABILITIES[0], now_s=0.0)[0].cache_salt == "s"


def test_adapters_need_room_in_the_executables() -> None:
    call = GenerationCall("a", TokenPrompt((5,)), adapter="x" * 1000)
    with pytest.raises(FeatureNotServed) as caught:
        check_call(call, CAPABILITIES[0])
    (violation,) = caught.value.violations
    assert violation.field == "adapter"
    assert len(violation.value) < 100
    check_call(call, Capabilities.from_manifest(make_manifest(num_adapter_slots=2)))
