"""Text of decoders that no table stands for: the text process makes it, a step at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from kiln.runtime.v1 import generation_pb2 as pb
from tokenizers import decoders

from bundle.errors import KilnError
from execution.text.control import DecodedStep, DecodeStep, Loaded, TokenPiece
from execution.text.errors import TextLimitExceeded
from runtime_svc.text.codec import PiecewiseText, TextCodec
from runtime_svc.text.text_queue import TextWorkers
from tests.checkpoints.tokenizer_files import byte_level
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import Runtime, text_of, token_request, tokens_of


def odd_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level, but its decoder changes the text too."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "<A>")])
    return tokenizer


async def test_streams_have_the_decoders_text(served: Runtime) -> None:
    tokenizer = odd_tokenizer()
    await served.deploy(tokenizer=tokenizer.to_str().encode())

    async def check(start: int) -> None:
        events = await served.generate([start], 40)
        assert tokens_of(events) == expected_tokens([start], 40)
        assert text_of(events) == tokenizer.decode(expected_tokens([start], 40))

    await asyncio.gather(*map(check, range(5, 12)))
    prompt = tokenizer.encode("a cat").ids
    text = await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="d", token_ids=prompt))
    assert text.text == "<A> c<A>t"


async def test_stop_strings_and_texts_of_tokens(served: Runtime) -> None:
    tokenizer = odd_tokenizer()
    await served.deploy(tokenizer=tokenizer.to_str().encode())
    whole = tokenizer.decode(expected_tokens([5], 40))
    request = token_request([5], 40)
    request.stop.stop_strings.append(whole[10:12])
    request.output.logprobs = 2
    events = [event async for event in served.generation.Generate(request)]
    assert text_of(events) == whole[: whole.index(whole[10:12])]
    for token in (token for event in events for token in event.delta.tokens):
        # No token of this tokenizer has another text alone than behind others.
        assert token.text == tokenizer.decode([token.id])


@pytest.mark.parametrize("make_tokenizer", [byte_level, odd_tokenizer])
async def test_tokens_of_prompts_say_where_their_characters_begin(
    served: Runtime, make_tokenizer: Callable[[], tokenizers.Tokenizer]
) -> None:
    tokenizer, text = make_tokenizer(), "n é🙂x"
    await served.deploy(tokenizer=tokenizer.to_str().encode())
    request = pb.GenerateRequest(deployment_id="d", text=text, output=pb.OutputOptions(echo=True))
    request.stop.max_new_tokens = 1
    told = [event.prompt async for event in served.generation.Generate(request) if event.HasField("prompt")]
    assert "".join(part.text for part in told) == text
    tokens = [token for part in told for token in part.tokens]
    # What ends within a character leaves the next token where it began itself.
    expected, begin = [], 0
    for index in range(len(tokens)):
        before = tokenizer.decode([token.id for token in tokens[:index]])
        begin = begin if before.endswith("\ufffd") else len(before)
        expected.append((True, begin))
    assert [(token.HasField("text_offset"), token.text_offset) for token in tokens] == expected
    assert {begin for _, begin in expected} >= {0, 3, 4}


class StubQueue:
    """Stands for a process that does not end with one of the sequences."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    async def run(self, _num_chars: None, call: DecodeStep, _answer_type: type, work: str) -> DecodedStep:
        self.calls.append(len(call.sequences))
        if any(13 in one.token_ids for one in call.sequences):
            raise TextLimitExceeded(work, "1 s")
        return DecodedStep(sequences=[[TokenPiece("x", "", [], 0) for _ in one.token_ids] for one in call.sequences])


async def decode(token_lists: Sequence[list[int]]) -> tuple[list[KilnError | None], list[PiecewiseText], StubQueue]:
    queue: Any = StubQueue()
    codec = TextCodec(queue, Loaded(max_token_bytes=1, table=None, texts=["x"] * 20), TextWorkers())
    texts = [PiecewiseText([], []) for _ in token_lists]
    return await codec.decode_step(list(zip(texts, token_lists, strict=True))), texts, queue


async def test_one_message_decodes_a_step() -> None:
    errors, texts, queue = await decode([[1], [2], [3]])
    assert (errors, queue.calls) == ([None] * 3, [3])
    assert [text.push(0) for text in texts] == ["x"] * 3


async def test_only_the_sequence_that_is_not_decoded_fails() -> None:
    errors, texts, queue = await decode([[1], [13], [3]])
    assert [type(error) for error in errors] == [type(None), TextLimitExceeded, type(None)]
    assert queue.calls == [3, 1, 1, 1]
    assert [texts[0].push(0), texts[2].push(0)] == ["x", "x"]
    with pytest.raises(IndexError):
        texts[1].push(0)
