"""One text process by itself: what a load may take, and what ends a process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import tokenizers
from tokenizers import decoders

from execution.forkserver.client import Forkserver
from execution.text.control import Encoded, EncodeText, Load, unpack_ids
from execution.text.errors import TextLimitExceeded, TextProcessLost
from execution.text.handle import TextLimits, TextProcess, make_forkserver
from tests.checkpoints.tokenizer_files import byte_level
from tests.running_time import running_time

TEXT = EncodeText(text="a cat")


@pytest.fixture
async def texts() -> AsyncIterator[Forkserver]:
    forkserver = make_forkserver()
    yield forkserver
    forkserver.close()


def save(tokenizer: tokenizers.Tokenizer, directory: Path) -> Load:
    tokenizer.save(str(directory / "tokenizer.json"))
    return Load(tokenizer=str(directory / "tokenizer.json"))


async def test_a_load_that_does_not_end_is_ended(tmp_path: Path, texts: Forkserver) -> None:
    """The decoder backtracks over each of the tokens, whose texts the process lists when it loads."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["a" * 21 + str(number) for number in range(500)])
    replace = decoders.Replace(tokenizers.Regex(r"(?:(a+)+)+\1b"), "x")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), replace])
    with running_time() as taken, pytest.raises(TextLimitExceeded) as caught:
        await TextProcess.start(save(tokenizer, tmp_path), texts, TextLimits(load_timeout_s=1.0))
    assert caught.value.work == "reading the tokenizer and the chat template"
    assert taken.s < 10


async def test_a_process_answers_until_it_is_closed(tmp_path: Path, texts: Forkserver) -> None:
    process = await TextProcess.start(save(byte_level(), tmp_path), texts, TextLimits())
    answer = await process.call(TEXT, Encoded, "making tokens")
    assert unpack_ids(answer.token_ids).tolist() == byte_level().encode("a cat").ids
    await process.close()
    assert process.has_ended
    with pytest.raises(TextProcessLost):
        await process.call(TEXT, Encoded, "making tokens")


async def test_a_process_that_dies_says_how(tmp_path: Path, texts: Forkserver) -> None:
    process = await TextProcess.start(save(byte_level(), tmp_path), texts, TextLimits())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    call = asyncio.create_task(process.call(TEXT, Encoded, "making tokens"))
    await asyncio.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(TextProcessLost, match=r"making tokens: SIGKILL"):
        await call


async def test_a_stopped_process_is_ended_by_the_clock(tmp_path: Path, texts: Forkserver) -> None:
    """The call ends although the forkserver, which is stopped too, tells of no end."""
    process = await TextProcess.start(save(byte_level(), tmp_path), texts, TextLimits(timeout_s=0.05))
    assert process.pid is not None
    forkserver = psutil.Process(process.pid).ppid()
    for pid in (forkserver, process.pid):
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TextProcessLost, match=r"no answer for 0\.3 s"):
            await asyncio.wait_for(process.call(TEXT, Encoded, "making tokens"), 5)
    finally:
        os.kill(forkserver, signal.SIGCONT)
    await process.close()
