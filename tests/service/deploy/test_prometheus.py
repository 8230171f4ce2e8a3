"""A real Prometheus scrapes a runtime under load, reads the rules, and answers what the board asks."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.hang_guard import HANG_S
from tests.repository import ROOT
from tests.servers.runtime import serve_runtime, tokens_of
from tests.tools import require_tool

MONITORING = ROOT / "deploy/monitoring"
#: Panels that say nothing of a runtime to which nothing bad happens.
QUIET = {
    "Calls a second that failed A",
    "Refused calls a second A",
    "Refused calls a second B",
    "Streams of clients that did not read, in an hour A",
    "Compiles A",
    "Compiles B",
    "Compiles C",
    "Seconds of a compile by stage, mean A",
    "Cache hits of compiles A",
    "Cache hits of compiles B",
}


def find_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def ask(port: int, path: str, **parameters: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

    def get() -> Any:
        with urllib.request.urlopen(url, timeout=HANG_S) as response:
            return json.loads(response.read())

    answer = await asyncio.to_thread(get)
    assert answer["status"] == "success", answer
    return answer["data"]


async def is_scraping(port: int) -> bool:
    """Whether a Prometheus answers, and has scraped all its targets; it finds them seconds after its start."""
    try:
        targets = (await ask(port, "targets"))["activeTargets"]
    except (urllib.error.URLError, ConnectionError):
        return False
    return bool(targets) and all(target["health"] == "up" for target in targets)


@asynccontextmanager
async def run_prometheus(directory: Path, target: int | None) -> AsyncIterator[int]:
    """Runs a Prometheus that scrapes a port of loopback twice a second; yields its own port."""
    program, port = require_tool("prometheus"), find_port()
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yml")],
        "scrape_configs": [{"job_name": "kiln-runtime", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(HANG_S):
            while not await is_scraping(port):  # noqa: ASYNC110 - Prometheus sends no event
                await asyncio.sleep(0.1)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def test_the_board_shows_a_runtime_under_load(tmp_path: Path) -> None:
    board = json.loads((MONITORING / "board.json").read_text())
    async with serve_runtime(tmp_path, "--metrics-address=127.0.0.1:0") as served:
        await served.deploy()
        served.ranks.step_s = 0.002
        async with run_prometheus(tmp_path, served.server.edge.metrics_port) as port:
            num_tokens = 0
            for _ in range(6):
                num_tokens += len(tokens_of(await served.generate([5, 6, 7], 40)))
                await asyncio.sleep(0.2)
            await served.load_weights("story")
            # Prometheus comes for all this when it has the time.
            async with asyncio.timeout(HANG_S):
                while await count_scraped_tokens(port) != num_tokens or not await find_empty(port, board) <= QUIET:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            (rules,) = (await ask(port, "rules"))["groups"]
            assert {rule["health"] for rule in rules["rules"]} <= {"ok", "unknown"}
            assert num_tokens == 240


async def find_empty(port: int, board: dict[str, Any]) -> set[str]:
    """What the board shows nothing of."""
    empty = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$model_name", ".*").replace("$__rate_interval", "10s")
            if not (await ask(port, "query", query=query))["result"]:
                empty.add(f"{panel['title']} {target['refId']}")
    return empty


async def count_scraped_tokens(port: int) -> float:
    samples = (await ask(port, "query", query="vllm:generation_tokens_total"))["result"]
    return sum(float(sample["value"][1]) for sample in samples)
