"""One Generate stays a short read."""

from __future__ import annotations

from tests.architecture.generate_path import trace_generate

#: Files of the front that a Generate passed in v0.1.
MAX_FILES = 28


async def test_a_generate_passes_no_more_files_than_in_the_first_release() -> None:
    files = await trace_generate()
    assert "runtime_svc/engine/scheduler/async_scheduling.py" in files, "the trace saw the engine's loop"
    assert "runtime_svc/text/text_queue.py" in files, "the trace saw the way to the text process"
    assert len(files) <= MAX_FILES, "\n".join(files)
