"""Runs SMG for the runtime whose network this container shares, while the runtime's engine API serves a deployment.

SMG learns its model when it starts and never again, so it runs only while there is one. Options go to `smg launch`.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ENGINE_SERVICE = "vllm.grpc.engine.VllmEngine"
#: A runtime's container that starts again has another network. This one joins it when it starts again in turn, which
#: has to be later: without the runtime, the container engine could not start it.
MAX_ABSENCE_S = 10.0
#: The runtime's --gateway-address is on loopback: a proxy of the environment is not for it.
DIRECT = (("grpc.enable_http_proxy", 0),)


async def run_while_serving(runtime: str, command: list[str]) -> None:
    """Starts and ends SMG as the runtime's health says; raises TimeoutError when the runtime is gone."""
    running: asyncio.Task[None] | None = None
    request = health_pb2.HealthCheckRequest(service=ENGINE_SERVICE)
    try:
        async with grpc.aio.insecure_channel(runtime, options=DIRECT) as channel:
            while True:
                await asyncio.wait_for(channel.channel_ready(), MAX_ABSENCE_S)
                with suppress(grpc.aio.AioRpcError):
                    async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                        is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                        if is_serving and running is None:
                            running = asyncio.create_task(run(command))
                        elif not is_serving and running is not None:
                            await end(running)
                            running = None
    finally:
        await end(running)


async def run(command: list[str]) -> None:
    """Runs SMG until this task is cancelled; SMG then finishes its requests."""
    process = await asyncio.create_subprocess_exec(*command)
    try:
        sys.exit(f"SMG ended with {await process.wait()}")
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()


async def end(running: asyncio.Task[None] | None) -> None:
    """Ends SMG if it runs."""
    if running is not None:
        running.cancel()
        await asyncio.wait([running])


async def main() -> None:
    """Reads the command line; ends when the runtime is gone, or at SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", required=True, metavar="HOST:PORT", help="the runtime's --gateway-address")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="an address of the runtime's --engine-adapter; may be repeated",
    )
    parser.add_argument("--api-key-file", required=True, type=Path, help="file of the key that clients show")
    options, rest = parser.parse_known_args()
    keys = ["--api-key", options.api_key_file.read_text().strip()]
    # No client gets this one: SMG would let every client with the other one add runtimes, and so read what others ask.
    keys += ["--control-plane-api-keys", f"none:none:admin:{secrets.token_urlsafe()}"]
    # A client that chose the id of its request would hide from the runtime that the prompt is a completion's.
    keys += ["--request-id-headers", "kiln-takes-none"]
    workers = [f"grpc://{address}" for address in (options.runtime, *options.adapter)]
    command = [sys.executable, "-m", "smg", "launch", "--worker-urls", *workers, *keys, *rest]
    serving = asyncio.create_task(run_while_serving(options.runtime, command))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await serving
    except TimeoutError:
        sys.exit(f"nothing answers at {options.runtime}")


if __name__ == "__main__":
    asyncio.run(main())
