"""Runs SMG, a gateway that others make, in front of a runtime: it speaks the HTTP APIs of OpenAI and Anthropic.

SMG tokenizes, renders chats and parses tool calls; the runtime generates, as `vllm.grpc.engine.VllmEngine`. SMG comes
from PyPI as `smg`, the extra `kiln-client[openai]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import urllib.request
from collections.abc import AsyncIterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from kiln_client.endpoint import is_loopback
from kiln_client.errors import FailedPrecondition, InvalidArgument
from kiln_client.stack.service_process import Service, ServiceProcess, first_of, reachable_address

GATEWAY: Final = Service(
    *("gateway", "smg", "kiln-client[openai]"),
    kind="gateway",
    # SMG asks the Hub for a model before it asks the runtime. Nothing can listen at port 0.
    variables={"HF_ENDPOINT": "http://127.0.0.1:0"},
)

_POLL_S: Final = 0.1
_PROBE_TIMEOUT_S: Final = 5.0
_MAX_PORT: Final = 65535
#: The gateway is on this host: a proxy of the environment is not for it.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Where a gateway listens, and how long it may take.

    Attributes:
        host: Address of an interface, or a name; an IPv6 address has no brackets.
        port: TCP port; 0 takes a free one.
        ready_timeout_s: Seconds in which it must serve the models.
        stop_timeout_s: Seconds in which it must end before it is killed; running requests may end in them.
    """

    host: str
    port: int
    log_path: Path
    ready_timeout_s: float
    stop_timeout_s: float

    @classmethod
    def parse(
        cls, address: str, *, allow_insecure: bool, log_path: Path, ready_timeout_s: float, stop_timeout_s: float
    ) -> GatewayConfig:
        """Reads an address, `host:port` or `[ipv6]:port`.

        Only if `allow_insecure`, clients of other hosts may reach the gateway, which authenticates no client.
        """
        host, _, port = address.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        if not host or "/" in host or (":" in bare) != (bare != host) or not _is_port(port):
            raise InvalidArgument.about(
                "openai",
                f"got {address!r}; accepted: HOST:PORT or [IPV6]:PORT with a port from 0 to 65535",
                f"{address!r} is no address for the gateway",
                reason="ADDRESS_INVALID",
            )
        if not allow_insecure and not is_loopback(bare):
            raise InvalidArgument.about(
                "openai",
                f"got {address!r}; accepted: a loopback address, or --allow-insecure",
                f"{address} is beyond this host, and the gateway has neither TLS nor authentication: every client"
                " that reaches it can use the model, and give it other runtimes",
                reason="PLAINTEXT_REFUSED",
                address=address,
            )
        return cls(bare, int(port), log_path, ready_timeout_s, stop_timeout_s)


class Gateway:
    """A gateway that serves models at `url`, such as `http://127.0.0.1:8000`; the API of OpenAI is below `/v1`."""

    def __init__(self, url: str, process: ServiceProcess) -> None:
        self.url = url
        self.pid = process.pid
        self._process = process

    async def failure(self) -> NoReturn:
        """Waits until the gateway ends by itself, which is a failure."""
        await self._process.failure()


def require_gateway() -> None:
    """Checks that SMG is installed."""
    if importlib.util.find_spec(GATEWAY.module) is None:
        raise FailedPrecondition(
            'the APIs of OpenAI and Anthropic need the distribution smg: pip install "kiln-client[openai]"',
            reason="GATEWAY_NOT_INSTALLED",
        )


@contextlib.asynccontextmanager
async def running_gateway(
    config: GatewayConfig, models: Mapping[str, str], tool_call_parser: str | None = None
) -> AsyncIterator[Gateway]:
    """Runs a gateway in front of a runtime until the block ends, and gives it when it serves all models.

    `models` are what clients ask for, the id of a deployment or an adapter's name, and the addresses of the runtime,
    `host:port` in plaintext, that serve them. `tool_call_parser` is SMG's, for all of them; None: it chooses.
    """
    port = config.port or find_free_port(config.host)
    bracketed = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{reachable_address(f'{bracketed}:{port}')}"
    process = await ServiceProcess.start(GATEWAY, _arguments(config, port, models, tool_call_parser), config.log_path)
    try:
        try:
            async with asyncio.timeout(config.ready_timeout_s):
                await first_of(_until_served(url, set(models)), process.failure())
        except TimeoutError:
            raise GATEWAY.not_ready(config.ready_timeout_s, config.log_path) from None
        yield Gateway(url, process)
    finally:
        await process.stop(config.stop_timeout_s)


def _arguments(config: GatewayConfig, port: int, models: Mapping[str, str], tool_call_parser: str | None) -> list[str]:
    return [
        "launch",
        *("--host", config.host, "--port", str(port)),
        *("--worker-urls", *(f"grpc://{address}" for address in models.values())),
        *("--worker-startup-check-interval", "1"),
        "--log-json",
        # A client that chose the id of its request would hide from the runtime that the prompt is a completion's.
        *("--request-id-headers", "kiln-takes-none"),
        *("--shutdown-grace-period-secs", str(int(config.stop_timeout_s))),
        # Its metrics would be at port 29000 of every interface.
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(find_free_port("127.0.0.1"))),
        *(() if tool_call_parser is None else ("--tool-call-parser", tool_call_parser)),
    ]


async def _until_served(url: str, models: Set[str]) -> None:
    while True:
        if await asyncio.to_thread(_are_served, url, models):
            return
        await asyncio.sleep(_POLL_S)


def _are_served(url: str, models: Set[str]) -> bool:
    """Whether a gateway has workers for models, and the models' tokenizers, which it fetches after the workers."""
    try:
        served, tokenizers = _get(f"{url}/v1/models"), _get(f"{url}/v1/tokenizers")
    except (OSError, ValueError):  # it does not listen yet, or the answer is an error
        return False
    return models <= {one["id"] for one in served["data"]} & {one["name"] for one in tokenizers["tokenizers"]}


def _get(url: str) -> dict[str, list[dict[str, str]]]:
    with _OPENER.open(url, timeout=_PROBE_TIMEOUT_S) as response:
        answer: dict[str, list[dict[str, str]]] = json.load(response)
        return answer


def find_free_port(host: str) -> int:
    """Finds a free port for a process that must be told one; it ends if another process takes the port before it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            message = f"the gateway cannot listen on {host}: {error.strerror}"
            raise InvalidArgument(message, reason="ADDRESS_INVALID") from error
        port: int = listener.getsockname()[1]
        return port


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= _MAX_PORT
