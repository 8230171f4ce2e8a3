"""One Generate stays a short read: it passes few source files of the front process.

A whole runtime serves on loopback, with fake ranks behind it. A file counts when one of its functions runs between the
call and its end, on the event loop or in a thread. A timer's turn may fall into one call; so only what each of a few
calls passes counts.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kiln.runtime.v1 import generation_pb2 as pb

from tests.repository import ROOT
from tests.servers.runtime import Runtime, serve_runtime

PACKAGES = ("runtime_svc", "edge")
#: Files of the front, that of its logs among them once a test has configured these. Those of the text process, of the
#: ranks and of the links to them come beside them.
MAX_FILES = 22
CALLS = 3


@contextmanager
def _record_files() -> Iterator[set[str]]:
    """Names of the files whose functions this thread and new threads enter, or enter again."""
    names: set[str] = set()
    previous = sys.gettrace()

    def record(frame: FrameType, _event: str, _argument: object) -> None:
        names.add(frame.f_code.co_filename)

    threading.settrace(record)
    sys.settrace(record)
    try:
        yield names
    finally:
        sys.settrace(previous)
        threading.settrace(previous)


async def _trace_call(served: Runtime, request: pb.GenerateRequest) -> set[str]:
    with _record_files() as names:
        events = [event async for event in served.generation.Generate(request)]
    assert sum(len(event.delta.tokens) for event in events) == 5
    return names


async def trace_generate() -> list[str]:
    """Files of the front that one Generate passes: text in, some tokens with log probabilities and their text out."""
    request = pb.GenerateRequest(
        deployment_id="d",
        text="a cat",
        stop=pb.StopConditions(max_new_tokens=5, stop_strings=["none"]),
        output=pb.OutputOptions(logprobs=1),
    )
    with tempfile.TemporaryDirectory() as directory:
        async with serve_runtime(Path(directory)) as served:
            await served.deploy()
            calls = [await _trace_call(served, request) for _ in range(CALLS)]
    names = set.intersection(*calls)
    roots = [ROOT / package for package in PACKAGES]
    paths = [path for path in map(Path, names) if any(path.is_relative_to(root) for root in roots)]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


async def test_a_generate_passes_few_files() -> None:
    files = await trace_generate()
    assert "runtime_svc/engine/engine.py" in files, "the trace saw the engine's loop"
    assert "runtime_svc/text/text_queue.py" in files, "the trace saw the way to the text process"
    assert len(files) <= MAX_FILES, "\n".join(files)
