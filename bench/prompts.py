"""The prompts that clients of the benchmark send, and one whose first token is awaited."""

from __future__ import annotations

import time
from typing import Any

from kiln_client import AsyncRuntime


async def find_first(runtime: AsyncRuntime, deployment: str, prompt: list[int], **options: Any) -> tuple[float, int]:
    """Sends a prompt; returns the seconds until its first token, and how many of its tokens the cache had."""
    start, first_s = time.perf_counter(), None
    async with runtime.generate(deployment, prompt, **(answer_greedily(1) | options)) as events:
        async for event in events:
            if event.delta.tokens and first_s is None:
                first_s = time.perf_counter() - start
            cached = event.finished.usage.cached_prompt_tokens
    assert first_s is not None, "an answer without a token"
    return first_s, cached


def make_prompt(tokens: int) -> list[int]:
    """Returns the ids of a prompt."""
    return list(range(5, 5 + tokens))


def answer_greedily(tokens: int) -> dict[str, Any]:
    """Returns the options of an answer of so many tokens."""
    return {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
