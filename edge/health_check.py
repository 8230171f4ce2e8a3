"""`python -m edge.health_check HOST:PORT`: exits with 0 if the server reports SERVING, otherwise with 1.

Containers use it for their health checks, because their images hold no other client.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported; the one line below says enough

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.loopback import channel_options


def check_health(address: str, credentials: grpc.ChannelCredentials | None, service: str, timeout_s: float) -> str:
    """Asks for the health of a service, or of the server as a whole if that is empty; in plaintext without credentials.

    Returns `SERVING`, the name of another state, or the reason why there is no answer.
    """
    options = channel_options(address)
    channel = (
        grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address, options)
    )
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, asks the server, prints its answer and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge.health_check", description="Asks a server for its health.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--service", default="", help="one service; default: the server as a whole")
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds for the answer")
    parser.add_argument("--tls-ca", type=Path, help="talk TLS; certificates that the server's one must lead to, PEM")
    parser.add_argument("--tls-certificate", type=Path, help="client certificate chain for mutual TLS, PEM")
    parser.add_argument("--tls-key", type=Path, help="its private key, PEM")
    options = parser.parse_args(arguments)
    if (options.tls_certificate is None) != (options.tls_key is None) or (options.tls_key and not options.tls_ca):
        parser.error("--tls-certificate and --tls-key belong together, and need --tls-ca")
    files = [options.tls_ca, options.tls_key, options.tls_certificate]
    try:
        pems = [None if path is None else path.read_bytes() for path in files]
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    credentials = None if options.tls_ca is None else grpc.ssl_channel_credentials(*pems)
    heard = check_health(options.address, credentials, options.service, options.timeout)
    sys.stdout.write(f"{heard}\n")
    return 0 if heard == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
