"""How long a test waits for what must happen, before it says that it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, Final

#: In seconds. It says nothing of how quick anything is: a busy machine can stand still for seconds, and only a test
#: that fails waits for so long. Shorter limits are for what a test asserts of time.
HANG_S: Final = 60.0


async def until(is_so: Callable[[], Any]) -> Any:
    """Waits until a function, or what it has to await, gives something true; returns that."""
    async with asyncio.timeout(HANG_S):
        while True:
            answer = is_so()
            if isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.003)
