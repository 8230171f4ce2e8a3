"""Runs one service as a child process: starts it, waits until it is healthy, watches it, stops it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kiln_client.endpoint import TlsOptions, open_channel
from kiln_client.errors import FailedPrecondition, Unavailable
from kiln_client.stack import tether
from kiln_client.stack.environment import Kind, inherit
from kiln_client.stack.home import open_private

T = TypeVar("T")

_READY = re.compile(rb"^ready address=(\S+)\r?\n", re.MULTILINE)
_READ_BYTES = 65536
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_LOG_TAIL_LINES = 5
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Service:
    """A service that can be started, from a distribution to install if the module is missing.

    It inherits what `kind` says of this process's environment, and gets `variables` besides.
    """

    name: str
    module: str
    distribution: str
    kind: Kind = "service"
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which it is started."""
        # A directory of the caller's, such as one named `edge`, must not pass for a package of the service.
        return {**inherit(self.kind), "PYTHONSAFEPATH": "1", **self.variables}

    def require_installed(self) -> None:
        """Checks that the module can be found."""
        if importlib.util.find_spec(self.module) is None:
            distribution = self.distribution
            raise FailedPrecondition(
                f"the {self.name} service is not installed: install the distribution {distribution} beside kiln-client",
                reason="SERVICE_NOT_INSTALLED",
                metadata={"service": self.name, "distribution": distribution},
            )

    def not_ready(self, timeout_s: float, log_path: Path) -> Unavailable:
        """Makes the error of a service that was not healthy in time."""
        return Unavailable(
            f"the {self.name} service was not ready after {timeout_s:g} s; its log is {log_path}",
            reason="SERVICE_NOT_READY",
            metadata={"service": self.name, "timeout_s": f"{timeout_s:g}", "log": log_path},
        )


class ServiceProcess:
    """A running service. It has a process group of its own, so that a terminal's Ctrl-C reaches only `kiln up`."""

    def __init__(
        self, service: Service, process: asyncio.subprocess.Process, stdout: asyncio.StreamReader, log_path: Path
    ) -> None:
        self._service = service
        self._process = process
        self._stdout = stdout
        self._log_path = log_path
        self._announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._copying = asyncio.create_task(self._copy_output())

    @classmethod
    async def start(cls, service: Service, arguments: Sequence[str], log_path: Path) -> Self:
        """Starts `python -m MODULE ARGUMENTS` and appends its output to the log."""
        tethered = (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()))
        # A pipe of our own: with one of asyncio's, asyncio would not report the end of a process before every process
        # that inherited the pipe has ended.
        read_end, write_end = os.pipe()
        with open_log(log_path) as log, os.fdopen(write_end, "wb") as pipe:
            stdout = await _open_reader(read_end)
            process = await asyncio.create_subprocess_exec(
                *(*tethered, sys.executable, "-m", service.module, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=log,
                env=service.environment | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        return cls(service, process, stdout, log_path)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def ready(self, timeout_s: float, tls: TlsOptions | None) -> str:
        """Waits until the service has announced its address and reports SERVING; returns the address."""
        try:
            async with asyncio.timeout(timeout_s):
                return await first_of(self._become_ready(tls), self.failure())
        except TimeoutError:
            raise self._service.not_ready(timeout_s, self._log_path) from None

    async def failure(self) -> NoReturn:
        """Waits until the process ends by itself, which is a failure."""
        returncode = await self._process.wait()
        await self._last_words()
        name, log_path = self._service.name, self._log_path
        how = f"exited with code {returncode}" if returncode >= 0 else f"was killed by signal {-returncode}"
        raise Unavailable(
            f"the {name} service {how}; its log is {log_path}\n{read_tail(log_path)}".rstrip("\n"),
            reason="SERVICE_EXITED",
            metadata={"service": name, "returncode": returncode, "log": log_path},
        )

    async def stop(self, grace_s: float) -> None:
        """Asks the service to end, kills it after `grace_s` seconds, then kills the rest of its process group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._last_words()

    async def _become_ready(self, tls: TlsOptions | None) -> str:
        address = await asyncio.shield(self._announced)
        async with open_channel(reachable_address(address), tls) as channel:
            # The server as a whole is SERVING only when every deployment is READY, which may take long or never happen.
            request = health_pb2.HealthCheckRequest(service="liveness")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return address
        return await asyncio.Future()  # the end of the process, or the timeout, explains more than the end of the watch

    async def _copy_output(self) -> None:
        """Finds the announcement of the address in standard output, and copies the rest to the log.

        The log has the service's events, so the announcement would be the only line that is none.
        """
        kept = b""
        with open_log(self._log_path) as log:
            while chunk := await self._stdout.read(_READ_BYTES):
                kept += chunk
                if not self._announced.done() and (match := _READY.search(kept)):
                    self._announced.set_result(match[1].decode())
                    kept = kept[: match.start()] + kept[match.end() :]
                # A line that has not ended may be the announcement.
                end = len(kept) if self._announced.done() else kept.rfind(b"\n") + 1
                log.write(kept[:end])
                kept = kept[end:]
            log.write(kept)

    async def _last_words(self) -> None:
        # Waits only briefly for the end of the output, because a grandchild may still hold the pipe.
        await asyncio.wait([self._copying], timeout=_LAST_WORDS_S)


def open_log(path: Path, *, is_new: bool = False) -> BinaryIO:
    """Opens a log that only its owner may read, to append to it, or to begin it anew; without a buffer."""
    return open(path, "wb" if is_new else "ab", buffering=0, opener=open_private)


def reachable_address(address: str) -> str:
    """Returns an address at which this host reaches a server: the loopback address if it listens on all addresses."""
    host, _, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"


async def _open_reader(file_descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(file_descriptor, "rb"))
    return reader


async def first_of(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Returns or raises the outcome of the coroutine that ends first, and cancels the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in ended).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def read_tail(log_path: Path) -> str:
    """Reads the last lines of a log."""
    with log_path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _READ_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
