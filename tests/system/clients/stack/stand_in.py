"""A service in miniature: what `kiln up` needs of one, and ways to misbehave.

`python stand_in.py NAME ARGUMENTS…` leaves its process id and arguments in `$STAND_IN_FOLDER/NAME.json` and behaves as
the JSON in `$STAND_IN_NAME` says:

    crash           exit with this code at once
    silent          never announce an address
    healthless      have no health service
    unhealthy       announce an address, but stay NOT_SERVING
    chatter_bytes   print this much without a line break before anything else
    stutter         announce the address in two pieces
    deaf            ignore SIGTERM
    litter          leave a child process in the process group
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


async def serve(name: str, arguments: list[str], behaviour: dict[str, int], litter: list[int]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: None if behaviour.get("deaf") else stopping.set())
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    if not behaviour.get("healthless"):
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = listen(server, dict(zip(arguments[::2], arguments[1::2], strict=True)))
    host = arguments[arguments.index("--address") + 1].rpartition(":")[0]
    await servicer.set("liveness", health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    record = {"pid": os.getpid(), "arguments": arguments, "litter": litter}
    # Whole at once, because tests read it as soon as it is there.
    path = Path(os.environ["STAND_IN_FOLDER"]) / f"{name}.json"
    path.with_suffix(".new").write_text(json.dumps(record))
    path.with_suffix(".new").rename(path)
    print("x" * behaviour.get("chatter_bytes", 0))  # noqa: T201 - what services do
    print("a line of the log", file=sys.stderr)  # noqa: T201
    if not behaviour.get("silent"):
        announcement = f"ready address={host}:{port}\n"
        half = len(announcement) - 3 if behaviour.get("stutter") else 0
        for part in (announcement[:half], announcement[half:]):
            sys.stdout.write(part)
            sys.stdout.flush()
            await asyncio.sleep(0.2 if half else 0)
    if not behaviour.get("unhealthy"):
        await asyncio.sleep(0.1)
        await servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    await stopping.wait()
    await server.stop(None)
    print("stopped in good order", file=sys.stderr)  # noqa: T201


def listen(server: grpc.aio.Server, options: dict[str, str]) -> int:
    if "--tls-certificate" not in options:
        return server.add_insecure_port(options["--address"])
    names = ("--tls-key", "--tls-certificate", "--tls-client-ca")
    key, certificate, client_ca = (Path(options[name]).read_bytes() if name in options else None for name in names)
    assert key is not None
    assert certificate is not None
    credentials = grpc.ssl_server_credentials(
        [(key, certificate)], client_ca, require_client_auth=client_ca is not None
    )
    return server.add_secure_port(options["--address"], credentials)


def main() -> None:
    name, *arguments = sys.argv[1:]
    behaviour = json.loads(os.environ.get(f"STAND_IN_{name.upper()}", "{}"))
    if "crash" in behaviour:
        print("cannot open the database", file=sys.stderr)  # noqa: T201
        sys.exit(behaviour["crash"])
    litter = [os.posix_spawnp("sleep", ["sleep", "600"], os.environ)] if "litter" in behaviour else []
    asyncio.run(serve(name, arguments, behaviour, litter))


if __name__ == "__main__":
    main()
