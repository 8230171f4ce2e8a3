"""Bounds on text that waits for workers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from runtime_svc.errors import QueueFull
from runtime_svc.text.text_queue import MAX_INLINE_CHARS, MIN_CALL_CHARS, Backlog, TextWorkers
from tests.hang_guard import until


async def test_text_that_waits_is_bounded() -> None:
    backlog, gate = Backlog(3 * MIN_CALL_CHARS), threading.Event()
    workers = TextWorkers(backlog)
    calls = [asyncio.create_task(workers.run(1, gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await workers.run(1, gate.wait)
    assert caught.value.retry_after_s == 1.0
    calls[0].cancel()
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull):
        await workers.run(1, gate.wait)
    gate.set()
    assert await asyncio.gather(*calls[1:]) == [True, True]
    await until(lambda: not backlog.num_pending)
    assert await workers.run(1, str.upper, "again") == "AGAIN"
    workers.close()


async def test_one_long_text_is_taken_alone() -> None:
    workers, gate = TextWorkers(Backlog(10)), threading.Event()
    long = asyncio.create_task(workers.run(1 << 30, gate.wait))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await workers.run(1, gate.wait)
    gate.set()
    assert await long
    workers.close()


async def test_errors_come_through() -> None:
    workers = TextWorkers()
    with pytest.raises(ZeroDivisionError):
        await workers.run(1, lambda: 1 // 0)
    workers.close()


async def test_only_what_is_large_takes_a_thread() -> None:
    workers = TextWorkers()
    assert await workers.run_if_large(MAX_INLINE_CHARS, threading.current_thread) is threading.current_thread()
    assert await workers.run_if_large(MAX_INLINE_CHARS + 1, threading.current_thread) is not threading.current_thread()
    workers.close()
