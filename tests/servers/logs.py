"""What servers log, as tests read it."""

from __future__ import annotations

from typing import Any

from tests.hang_guard import until

Logs = list[dict[str, Any]]


async def finished_calls(logs: Logs, method: str = "", count: int = 1) -> Logs:
    """Returns the lines of `count` calls whose method ends so, or of more; a client may have its answer before that."""

    def find() -> Logs:
        return [log for log in logs if log["event"] == "call" and log["method"].endswith(method)]

    await until(lambda: len(find()) >= count)
    return find()
