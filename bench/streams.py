"""A worker: clients of a served deployment, all in one process."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from kiln_client import AsyncRuntime

from bench.worker import serve


def stream(*, address: str, deployment: str, streams: int, context: int, tokens: int, front: int) -> dict[str, float]:
    """Streams greedy answers of `tokens` tokens each, while all of them stream.

    Args:
        front: Process id of the runtime's front.

    Returns:
        `step_s`: seconds of a step that gives every stream one token. `front_cpu_s`: the front's processor seconds for
        each token.
    """
    meter = _Meter(streams, tokens, front)
    asyncio.run(_stream(address, deployment, context, tokens, meter))
    return meter.result()


@dataclass(frozen=True)
class _Mark:
    """Totals at one moment: clock, tokens of all streams, processor time of the front."""

    at: float
    tokens: int
    cpu_s: float


class _Meter:
    """Counts tokens from the moment when every stream has one until the moment when one stream has all."""

    def __init__(self, streams: int, tokens: int, front: int) -> None:
        self.streams = streams
        self._waiting = streams
        self._tokens = tokens
        self._front = front
        self._total = 0
        self._start: _Mark | None = None
        self._end: _Mark | None = None

    def count(self, before: int, new: int) -> None:
        """Counts `new` tokens of a stream that already had `before`."""
        self._total += new
        if before == 0 and new > 0:
            self._waiting -= 1
            if self._waiting == 0:
                self._start = self._mark()
        if before + new == self._tokens and self._end is None:
            self._end = self._mark()

    def result(self) -> dict[str, float]:
        """Time per step, and the front's processor time per token.

        Raises:
            ValueError: A stream had ended before the last one began.
        """
        if self._start is None or self._end is None or self._end.tokens - self._start.tokens < self.streams:
            raise ValueError(f"{self.streams} streams of {self._tokens} tokens did not run at the same time")
        counted = self._end.tokens - self._start.tokens
        return {
            "step_s": (self._end.at - self._start.at) / counted * self.streams,
            "front_cpu_s": (self._end.cpu_s - self._start.cpu_s) / counted,
        }

    def _mark(self) -> _Mark:
        return _Mark(time.perf_counter(), self._total, cpu_time_s(self._front))


async def _stream(address: str, deployment: str, context: int, tokens: int, meter: _Meter) -> None:
    async with AsyncRuntime(address) as runtime:
        await asyncio.gather(*(_one(runtime, deployment, context, tokens, meter) for _ in range(meter.streams)))


async def _one(runtime: AsyncRuntime, deployment: str, context: int, tokens: int, meter: _Meter) -> None:
    had = 0
    prompt = list(range(5, 5 + context))
    options = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    async with runtime.generate(deployment, prompt, **options) as events:
        async for event in events:
            meter.count(had, len(event.delta.tokens))
            had += len(event.delta.tokens)


def cpu_time_s(process: int) -> float:
    """Processor time of a process's threads in seconds, exact to the nanosecond; `ps` counts hundredths of seconds."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    serve({"stream": stream})
