"""The base of the asynchronous clients: one channel, calls with deadlines, errors as KilnError."""

from __future__ import annotations

import asyncio
import os
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kiln_client.endpoint import Timeouts, TlsOptions, is_local, open_channel, resolve_address
from kiln_client.errors import ClientClosed, KilnError, Unimplemented, error_from_rpc
from kiln_client.stack.home import find_services, known_homes
from kiln_client.streams import AsyncStream, is_caller_cancelled
from kiln_client.tokens import Authorization

Q = TypeVar("Q")
R = TypeVar("R")

# What each server's health knows, and the other's does not.
_SERVICES = {"compiler": "kiln.compiler.v1.CompilerService", "runtime": "kiln.runtime.v1.RuntimeService"}
_HEALTH_TIMEOUT_S = 2.0


class ServiceClient:
    """Base of the asynchronous clients.

    A client belongs to the event loop of its first call. Callers close it, or use it with `async with`.
    """

    address_variable: ClassVar[str]
    """Environment variable with the address for constructor calls without one."""

    def __init__(
        self,
        address: str | None = None,
        *,
        tls: TlsOptions | None = None,
        timeouts: Timeouts | None = None,
        token: str | Path | None = None,
        allow_plaintext_token: bool = False,
    ) -> None:
        """Prepares a client without sending anything.

        Args:
            address: `host:port`. Default: the environment variable, then the service of a home that runs (KILN_HOME, or
                `.kiln` here and the default home), then the default port on this host.
            tls: Options of TLS; None connects as the services of the home serve, to others in plaintext.
            timeouts: Default deadlines of calls.
            token: Bearer token for every call, or the file that holds it, which is read again when it has changed;
                an empty text sends none. Default: KILN_TOKEN, then the file of KILN_TOKEN_FILE, then the token of the
                home whose services listen at the address.
            allow_plaintext_token: Whether a token may leave this host without TLS.

        Raises:
            InvalidArgument: Reason ADDRESS_INVALID.
            InvalidArgument: Reason TOKEN_IN_PLAINTEXT: the token would leave this host without TLS, and may not.
            TokenUnusable: The token is none that a header can carry.
        """
        self._note = ""
        if not (address or os.environ.get(self.address_variable)):
            services = find_services()
            if services is None:
                homes = " or ".join(map(str, known_homes()))
                reason = f"no services run on {homes}" if homes else "this user has no home"
                self._note = f", the default because {reason},"
            else:
                address, tls = getattr(services, self._role), tls or services.tls
        self.address = resolve_address(address, self.address_variable)
        self.timeouts = timeouts or Timeouts()
        self._tls = tls
        self._authorization = Authorization(
            self.address, token, is_private=tls is not None or is_local(self.address), may_expose=allow_plaintext_token
        )

    @property
    def _role(self) -> str:
        return self.address_variable.removeprefix("KILN_").lower()

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        return open_channel(self.address, self._tls)

    async def close(self) -> None:
        """Closes the connection. Running calls raise ClientClosed."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, R], request: Q, timeout_s: float) -> R:
        try:
            return await method(request, timeout=timeout_s, metadata=self._authorization.metadata())
        except grpc.aio.AioRpcError as error:
            raise await self._explain(error) from None
        except asyncio.CancelledError:
            if is_caller_cancelled():
                raise
            raise ClientClosed from None

    def _stream(self, method: grpc.aio.UnaryStreamMultiCallable[Q, R], request: Q, timeout_s: float) -> AsyncStream[R]:
        loop = asyncio.get_running_loop()
        call = method(request, timeout=timeout_s, metadata=self._authorization.metadata())
        return AsyncStream(call, loop, self._explain)

    async def _explain(self, error: grpc.aio.AioRpcError) -> KilnError:
        """Converts the error of a call. If the server lacks the method, asks it which service it is."""
        known = error_from_rpc(error, self.address, self._note)
        if not isinstance(known, Unimplemented) or known.reason != known.code:
            return known
        wanted = self._role
        serving = [role for role, service in _SERVICES.items() if await self._serves(service)]
        if wanted in serving:
            return known
        found = next(iter(serving), "")
        answers = f"the {found} answers at {self.address}" if found else f"{self.address} is no {wanted} of Kiln"
        return Unimplemented(
            f"{answers}, and the call is for the {wanted}: check --{wanted}, or KILN_{wanted.upper()}",
            reason="WRONG_SERVICE",
            metadata={"address": self.address, "wanted": wanted, "found": found},
        )

    async def _serves(self, service: str) -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            await health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=_HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return True
