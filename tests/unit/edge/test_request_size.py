"""Sizes of requests that nothing has parsed yet."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from kiln.runtime.v1 import generation_pb2 as pb

from edge.errors import RequestTooLarge
from edge.request_limit import SMALL_BYTES, RequestLimit
from edge.request_size import check_size, count_fields

DESCRIPTOR = pb.GenerateRequest.DESCRIPTOR
MANY = 1 << 30


def count_values(message: Message) -> int:
    """Fields of a message by its parsed values. Packed lists are one field."""
    count = 0
    for field, value in message.ListFields():
        values = [value] if not field.is_repeated or field.is_packed else value
        count += len(values)
        count += sum(count_values(one) for one in values if isinstance(one, Message))
    return count


TURNS = st.lists(
    st.builds(
        pb.ChatMessage,
        role=st.text(max_size=3),
        content_parts=st.lists(st.builds(pb.ContentPart, text=st.text(max_size=2)), max_size=3),
        tool_calls=st.lists(st.builds(pb.ToolCall, name=st.text(max_size=2)), max_size=2),
    ),
    max_size=5,
)


@given(TURNS, st.lists(st.integers(0, 2**31 - 1), max_size=4), st.floats(width=32), st.text(max_size=300))
def test_fields_are_those_that_a_parser_finds(
    turns: list[pb.ChatMessage], ids: list[int], temperature: float, name: str
) -> None:
    request = pb.GenerateRequest(
        deployment_id=name,
        chat=pb.Chat(messages=turns, tools_json=["{}", ""]),
        sampling=pb.SamplingParams(temperature=temperature, seed=1 << 63),
        stop=pb.StopConditions(stop_token_ids=ids),
    )
    assert count_fields(request.SerializeToString(), DESCRIPTOR, MANY) == count_values(request)


def test_elements_of_a_list_that_is_not_packed_are_fields() -> None:
    ids = bytes([1 << 3, 5]) * 100
    assert count_fields(b"\x2a\xc8\x01" + ids, DESCRIPTOR, MANY) == 101


def test_counting_ends_with_enough() -> None:
    many_turns = b"\x0a\x00" * 50_000
    data = pb.GenerateRequest(chat=pb.Chat.FromString(many_turns)).SerializeToString()
    assert count_fields(data, DESCRIPTOR, 10) == 11


@given(st.binary(max_size=60))
def test_any_bytes_are_counted_or_no_message(data: bytes) -> None:
    try:
        count = count_fields(data, DESCRIPTOR, MANY)
    except DecodeError:
        with pytest.raises(DecodeError):
            pb.GenerateRequest.FromString(data)
    else:
        assert 0 <= count <= len(data)


async def test_larger_request_is_refused_with_size_and_limit() -> None:
    limit = RequestLimit(max_bytes=SMALL_BYTES, max_fields=1)
    with pytest.raises(RequestTooLarge, match="65539 bytes; accepted: at most 65536 bytes"):
        await check_size(pb.GenerateRequest(text="a" * 65535).SerializeToString(), DESCRIPTOR, limit)
    with pytest.raises(RequestTooLarge, match="2 fields; accepted: at most 1 fields"):
        await check_size(pb.GenerateRequest(adapter="a", text="b").SerializeToString(), DESCRIPTOR, limit)
    await check_size(pb.GenerateRequest(text="b").SerializeToString(), DESCRIPTOR, limit)


def test_limit_takes_what_any_takes() -> None:
    assert RequestLimit.join([]) == RequestLimit()
    wide, deep = RequestLimit(1 << 20, 1), RequestLimit(1, 1 << 20)
    assert RequestLimit.join([wide, deep]) == RequestLimit(1 << 20, 1 << 20)
