"""`python -m bench.gateway`: measures the ways to a deployment in turns; see the package."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from kiln_client import AsyncRuntime
from kiln_client.stack.gateway import Gateway, GatewayConfig, running_gateway

from bench.checkpoint import count_parameters, write_checkpoint
from bench.gateway.chats import CONFIG, CROWDS
from bench.gateway.report import WAYS, render
from bench.measurements import Measurements
from bench.plan import QUICK, WORKLOADS, Workload, decode_bundle
from bench.services import DEPLOYMENT, Services, compile_bundle, deployed, running_services
from bench.worker import ROOT, Worker

RESULTS: Final = Path(__file__).with_name("RESULTS.md")
MODEL: Final = "random"
#: The text of the tokenizer's begin-of-sequence token, which SMG leaves out of prompts, and the runtime adds.
BOS: Final = "<|begin|>"
#: The shipped model, which has a template for chats.
TALKER: Final = ROOT / "examples/models/kiln-tiny"
#: Name of its bundle.
CHATS: Final = "chats"


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, not how fast")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the page to write")
    options = parser.parse_args()
    plan = QUICK[0] if options.quick else replace(WORKLOADS["160m-float32"], batches=(1, 16))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    measured = Measurements()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_checkpoint(work / "models" / MODEL, plan)
        shutil.copytree(TALKER, work / "models" / TALKER.name)
        with running_services(work / "home", work / "models") as services, Worker("bench.gateway.streams") as clients:
            _say("compiling")
            names = [decode_bundle(batch) for batch in plan.batches]
            compiled = {name: compile_bundle(services, name, plan.bundles[name], MODEL) for name in names}
            talker = compile_bundle(services, CHATS, CONFIG, TALKER.name)
            for number in range(plan.rounds):
                measured.begin_round()
                for batch in plan.batches:
                    bundle = compiled[decode_bundle(batch)]
                    _say(f"round {number + 1} of {plan.rounds}, {batch} streams")
                    with deployed(services, bundle.digest, plan.num_threads):
                        log_path = work / "gateway.log"
                        measuring = _measure(
                            measured, plan, batch, services=services, clients=clients, log_path=log_path
                        )
                        asyncio.run(measuring)
                _say(f"round {number + 1} of {plan.rounds}, chats")
                with deployed(services, talker.digest, plan.num_threads):
                    asyncio.run(_measure_chats(measured, services, clients, work / "gateway.log"))
        text = render(measured, plan, count_parameters(work / "models" / MODEL)[0])
    options.output.write_text(text)
    print(text)


async def _measure(
    measured: Measurements, plan: Workload, batch: int, *, services: Services, clients: Worker, log_path: Path
) -> None:
    """Measures every way once, in turn; the gateway runs beside all of them."""
    prompt = "Once" + " upon" * (plan.context - 2)
    async with _running_gateway(services, log_path) as gateway:
        async with AsyncRuntime(services.runtime) as runtime:
            assert len(await runtime.tokenize(DEPLOYMENT, prompt)) == plan.context, "the prompts of all ways are equal"
        for way in WAYS:
            is_gateway = way == "gateway"
            answer = await asyncio.to_thread(
                clients.call,
                "stream",
                way=way,
                address=gateway.url if is_gateway else services.runtime,
                prompt=BOS + prompt if is_gateway else prompt,
                streams=batch,
                tokens=2 * plan.steps,
                processes={"front": services.front.pid} | ({"gateway": gateway.pid} if is_gateway else {}),
            )
            for name, figure in answer.items():
                if not isinstance(figure, list):
                    measured.add(f"{way}.{batch}.{name}", figure)


async def _measure_chats(measured: Measurements, services: Services, clients: Worker, log_path: Path) -> None:
    """Measures chats that begin at once; those of the first crowd once before, to warm up."""
    async with _running_gateway(services, log_path) as gateway:
        ask = partial(clients.call, "time_chats", runtime=services.runtime, gateway=gateway.url)
        await asyncio.to_thread(ask, chats=CROWDS[0])
        for chats in CROWDS:
            for way, duration_s in (await asyncio.to_thread(ask, chats=chats)).items():
                measured.add(f"chats.{chats}.{way}_s", duration_s)


def _running_gateway(services: Services, log_path: Path) -> AbstractAsyncContextManager[Gateway]:
    config = GatewayConfig("127.0.0.1", 0, log_path, ready_timeout_s=60, stop_timeout_s=1)
    return running_gateway(config, services.runtime, DEPLOYMENT)


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


if __name__ == "__main__":
    main()
