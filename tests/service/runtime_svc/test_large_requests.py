"""Requests of megabytes: refused by their size before any of it is converted, and never at the cost of other calls."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from runtime_svc.api.generation_wire import MAX_LIST, call_from_pb
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, token_request, tokens_of

# Just below the largest message that gRPC lets in.
SIZE = (16 << 20) - 1024
#: Processor time that a refusal may take, gRPC's own work on both sides included; converting these requests takes more
#: than a second, tokenizing the text fifteen.
MAX_PROCESSOR_S = 0.7
#: Memory that a refusal may take for a moment: copies of the message at the client, in gRPC, at the server. Converting
#: these requests takes 280 MB to 3.3 GB.
MAX_GROWTH_BYTES = 5 * SIZE

LONG: dict[str, Any] = {"prompt_buckets": (32768,), "token_buckets": (32768,)}
GENERATE, TOKENIZE, DETOKENIZE = "Generate", "Tokenize", "Detokenize"


def field(number: int, value: bytes) -> bytes:
    """A field of bytes, a string or a message on the wire."""
    length, key = len(value), bytes([number << 3 | 2])
    digits = []
    while length >= 0x80:
        digits.append(length & 0x7F | 0x80)
        length >>= 7
    return key + bytes([*digits, length]) + value


ID = field(1, b"d")
TURN = field(1, pb.ChatMessage(role="user").SerializeToString())
EMPTY_TURN = field(1, b"")
TOOL = field(2, b'{"name": "' + b"x" * ((64 << 10) - 12) + b'"}')


def fill(piece: bytes) -> bytes:
    return piece * (SIZE // len(piece))


LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "token ids": (GENERATE, lambda: field(5, field(1, bytes(SIZE)))),
    "negative token ids": (GENERATE, lambda: field(5, field(1, fill(b"\xff" * 9 + b"\1")))),
    "ids of a text": (DETOKENIZE, lambda: field(2, bytes(SIZE))),
    "text": (GENERATE, lambda: field(3, b"a" * SIZE)),
    "text to tokenize": (TOKENIZE, lambda: field(2, b"a" * SIZE)),
    "turns": (GENERATE, lambda: field(4, fill(TURN))),
    "empty turns": (GENERATE, lambda: field(4, fill(EMPTY_TURN))),
    "parts of a turn": (TOKENIZE, lambda: field(3, field(1, fill(field(3, b""))))),
    "tools": (GENERATE, lambda: field(4, TURN + TOOL * 128)),
    "stop tokens": (GENERATE, lambda: field(3, b"a") + field(7, field(3, bytes(SIZE)))),
    "biases": (GENERATE, lambda: field(3, b"a") + field(6, fill(field(9, b"")))),
}


def reset_peak_memory() -> int:
    """Makes the peak of this process' memory what it has now, in bytes, and returns that."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_memory("VmHWM")


def read_memory(name: str) -> int:
    """Returns a line of this process' status, in bytes; see proc(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


async def call(served: Runtime, method: str, data: bytes) -> Any:
    path = f"/kiln.runtime.v1.GenerationService/{method}"
    if method == GENERATE:
        return await served.channel.unary_stream(path)(data).read()
    return await served.channel.unary_unary(path)(data)


async def test_large_request_is_refused_at_little_cost(served: Runtime) -> None:
    await served.deploy()
    for name, (method, make) in LARGE.items():
        data = ID + make()
        started_s = time.process_time()
        before_bytes = reset_peak_memory()
        await refused(call(served, method, data), "INVALID_ARGUMENT", "REQUEST_TOO_LARGE")
        assert time.process_time() - started_s < MAX_PROCESSOR_S, name
        assert read_memory("VmHWM") - before_bytes < MAX_GROWTH_BYTES, name
    assert tokens_of(await served.generate([5], 3)) == expected_tokens([5], 3)


TURN_OF_TEXT = pb.ChatMessage(role="user", content="a" * 131072)
#: What is told, and where. Beside a deployment of a longer context the server takes longer requests, for it alone.
TOO_LONG: list[tuple[pb.GenerateRequest, str, str, str]] = [
    (pb.GenerateRequest(text="a" * 65537), "text", "num_bytes", "65537"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[TURN_OF_TEXT])), "chat", "max_bytes", "131072"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 1025)), "chat", "num_messages", "1025"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 9000)), "token_ids", "num_tokens", "9000"),
]


async def test_prompt_that_its_deployment_cannot_take_is_not_converted(
    served: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.deploy()
    await served.deploy("long", ref="long", **LONG)

    def convert(*_: Any, **__: Any) -> None:
        raise AssertionError("converted")

    monkeypatch.setattr("runtime_svc.api.generation.call_from_pb", convert)
    for request, path, key, value in TOO_LONG:
        request.deployment_id = "d"
        how = await refused(served.generation.Generate(request), "INVALID_ARGUMENT", "PROMPT_TOO_LONG", path)
        assert how.metadata[key] == value


async def test_longer_context_takes_longer_requests(served: Runtime) -> None:
    await served.deploy("long", **LONG)
    prompt = [5] * 30000
    assert tokens_of(await served.generate(prompt, 2, deployment_id="long")) == expected_tokens(prompt, 2)
    text = (await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="long", token_ids=prompt))).text
    tokenized = await served.generation.Tokenize(pb.TokenizeRequest(deployment_id="long", text=text))
    assert list(tokenized.token_ids) == [1, *prompt], "the begin of the sequence, and the same again"


async def test_large_prompts_are_converted_and_checked_in_threads(
    served: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loop does for a long prompt, every stream waits for."""
    await served.deploy("long", **LONG)
    on_loop = threading.current_thread()
    threads = set()
    for module, name in (
        ("runtime_svc.api.generation", "call_from_pb"),
        ("runtime_svc.deployments.deployment", "check_call"),
        ("runtime_svc.deployments.deployment", "check_token_ids"),
    ):
        real = getattr(importlib.import_module(module), name)

        def watch(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            threads.add(threading.current_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(f"{module}.{name}", watch)
    turn = pb.ChatMessage(role="user", content="a" * 1024)
    chat = pb.GenerateRequest(deployment_id="long", chat=pb.Chat(messages=[turn] * 70))
    await refused(served.generation.Generate(chat), "INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert threads
    assert on_loop not in threads


def test_stop_tokens_beyond_any_limit_are_not_converted() -> None:
    request = token_request([5])
    request.stop.stop_token_ids.extend([5] * 100_000)
    assert len(call_from_pb(request, request_id="one").stop_token_ids) == MAX_LIST
