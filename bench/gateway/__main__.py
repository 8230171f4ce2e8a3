"""`python -m bench.gateway`: measures chats at once, by each way in turn; see the package."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from kiln_client.stack.gateway import GatewayConfig, running_gateway

from bench.gateway.chats import CONFIG, CROWDS, ROWS, TOKENS
from bench.machine import describe_machine
from bench.measurements import Measurements
from bench.services import DEPLOYMENT, Services, compile_bundle, deployed, running_services
from bench.tables import render_table
from bench.worker import ROOT, Worker

RESULTS: Final = Path(__file__).with_name("RESULTS.md")
#: The shipped model, which has a template for chats.
TALKER: Final = ROOT / "examples/models/kiln-tiny"
THREADS: Final = 2


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the page to write")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    measured = Measurements()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        shutil.copytree(TALKER, work / "models" / TALKER.name)
        with running_services(work / "home", work / "models") as services, Worker("bench.gateway.chats") as clients:
            talker = compile_bundle(services, "chats", CONFIG, TALKER.name)
            for _ in range(options.rounds):
                measured.begin_round()
                with deployed(services, talker.digest, THREADS):
                    asyncio.run(_measure(measured, services, clients, work / "gateway.log"))
    text = _render(measured, options.rounds)
    options.output.write_text(text)
    print(text)


async def _measure(measured: Measurements, services: Services, clients: Worker, log_path: Path) -> None:
    """Measures every crowd; the first one once before, to warm up."""
    config = GatewayConfig("127.0.0.1", 0, log_path, ready_timeout_s=60, stop_timeout_s=1)
    async with running_gateway(config, {DEPLOYMENT: services.runtime}) as gateway:
        ask = partial(clients.call, "time_chats", runtime=services.runtime, gateway=gateway.url)
        await asyncio.to_thread(ask, chats=CROWDS[0])
        for chats in CROWDS:
            for way, duration_s in (await asyncio.to_thread(ask, chats=chats)).items():
                measured.add(f"{chats}.{way}", duration_s)


def _render(measured: Measurements, rounds: int) -> str:
    rows = []
    for chats in CROWDS:
        base = f"{chats}.service"
        figures = [f"{measured.typical(base):.2f} s"]
        for name in (f"{chats}.stream", f"{chats}.whole"):
            share = measured.relate(lambda one, service: one / service, name, base)
            figures.append(f"{measured.typical(name):.2f} s ({share:.2f})")
        rows.append((str(chats), *figures))
    head = ("chats at once", "GenerationService", "SMG, streams", "SMG, whole")
    return (
        "# Chats at once\n\n"
        f"Written by `python -m bench.gateway`; medians of {rounds} rounds in which both took turns.\n\n"
        f"Machine: {describe_machine()}.\n\n"
        "Seconds until the last of the chats has ended, and the median of the rounds' ratios to GenerationService's:\n"
        f"the shipped model with {ROWS} rows, {TOKENS} tokens each. The aim is a ratio of at most 1.3.\n\n"
        f"{render_table(head, rows)}\n"
    )


if __name__ == "__main__":
    main()
