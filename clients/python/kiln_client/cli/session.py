"""The common part of all commands: shared options, output, connections, and running the coroutine."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click

from kiln_client.bundles import AsyncBundles
from kiln_client.cli.output import Output
from kiln_client.compiler import AsyncCompiler
from kiln_client.endpoint import DEFAULT_ADDRESSES, TlsOptions
from kiln_client.errors import Cancelled
from kiln_client.runtime import AsyncRuntime
from kiln_client.service_client import ServiceClient

ClientT = TypeVar("ClientT", bound=ServiceClient)

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

_META = "kiln_client."


class Terminated(Cancelled):
    """The command was ended by SIGTERM."""

    def __init__(self) -> None:
        super().__init__("the command was terminated", reason="INTERRUPTED")


@dataclass(frozen=True, slots=True)
class Session:
    """One run of one command. Addresses are `host:port`; None takes the environment's or the default.

    Attributes:
        tls: Options of TLS; None connects in plaintext.
        token_path: File of the token for every call; None takes the environment's, or that of a home.
        may_expose_token: Whether a token may leave this host without TLS.
    """

    output: Output
    compiler_address: str | None
    runtime_address: str | None
    tls: TlsOptions | None
    token_path: Path | None
    may_expose_token: bool

    def compiler(self) -> AsyncCompiler:
        """Opens a client of the compiler service."""
        return self._open(AsyncCompiler, self.compiler_address)

    def bundles(self) -> AsyncBundles:
        """Opens a client of the compiler service's bundles."""
        return self._open(AsyncBundles, self.compiler_address)

    def runtime(self) -> AsyncRuntime:
        """Opens a client of the runtime service."""
        return self._open(AsyncRuntime, self.runtime_address)

    def _open(self, client: type[ClientT], address: str | None) -> ClientT:
        return client(address, tls=self.tls, token=self.token_path, allow_plaintext_token=self.may_expose_token)


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    # These options may come before or after the command's name. If both are given, the latter wins.
    if value is not None:
        context.meta[f"{_META}{parameter.name}"] = value


class _ConnectionOption(click.Option):
    """An option of every command that talks to a service.

    `kiln --help` describes these options. The help of a command points there, in place of the first of them.
    """

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        if ctx.parent is None:
            return super().get_help_record(ctx)
        names = "--compiler, --tls…, --token…"
        return (names, "Connection: see `kiln --help`.") if self.name == "compiler" else None


def _shared_option(*names: str, **attributes: Any) -> Decorator:
    return click.option(*names, expose_value=False, callback=_remember, default=None, **attributes)


def _connection_option(*names: str, **attributes: Any) -> Decorator:
    return _shared_option(*names, cls=_ConnectionOption, **attributes)


_JSON = _shared_option("--json", is_flag=True, help="Print JSON: one object per line, the result last.")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_CONNECTION = (
    _connection_option(
        "--compiler",
        metavar="HOST:PORT",
        help="Compiler service. Default: KILN_COMPILER, then that of a home whose services run (KILN_HOME; or .kiln "
        f"here, then $XDG_DATA_HOME/kiln), then {DEFAULT_ADDRESSES['KILN_COMPILER']}.",
    ),
    _connection_option(
        "--runtime",
        metavar="HOST:PORT",
        help="Runtime service. Default: KILN_RUNTIME, then that of such a home, then "
        f"{DEFAULT_ADDRESSES['KILN_RUNTIME']}.",
    ),
    _connection_option("--tls", is_flag=True, help="Use TLS and trust the authorities that gRPC ships."),
    _connection_option("--tls-ca", type=_FILE, help="Use TLS and trust the authorities in this PEM file."),
    _connection_option("--tls-cert", type=_FILE, help="PEM certificate chain of this client, for mutual TLS."),
    _connection_option("--tls-key", type=_FILE, help="PEM private key of this client, for mutual TLS."),
    _connection_option(
        "--token-file",
        type=_FILE,
        help="File of the bearer token for every call. Default: KILN_TOKEN, which holds the token itself, then "
        "KILN_TOKEN_FILE, then the token of the home whose services listen at the address.",
    ),
    _connection_option(
        "--allow-plaintext-token", is_flag=True, help="Let the token leave this host without TLS, for others to read."
    ),
    _JSON,
)


def add_options(options: Sequence[Decorator]) -> Decorator:
    """Makes a decorator that adds options to a command, which its help shows in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)

    return decorate


def shared_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that may come before or after a command's name."""
    return add_options(_CONNECTION)(function)


def remote_command(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    """Makes the body of a command that talks to a service from a coroutine function that takes a Session."""
    return shared_options(_body(function))


def local_command(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    """Makes the body of a command that talks to no service from a coroutine function that takes a Session."""
    return _JSON(_body(function))


def _body(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    @functools.wraps(function)
    @click.pass_context
    def run(context: click.Context, /, **arguments: Any) -> None:
        asyncio.run(_run_until_terminated(function(_session(context), **arguments)))

    return run


async def _run_until_terminated(command: Coroutine[Any, Any, None]) -> None:
    """Runs a command. SIGTERM cancels it, as asyncio lets Ctrl-C do, so that it can cancel what it has started.

    A command that stops services replaces this reaction by its own.
    """
    task, is_terminated = asyncio.current_task(), False
    assert task is not None

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        task.cancel()

    if threading.current_thread() is threading.main_thread():  # no other thread can react to signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        await command
    except asyncio.CancelledError:
        if is_terminated:
            raise Terminated from None
        raise


def _session(context: click.Context) -> Session:
    def given(name: str) -> Any:
        return context.meta.get(f"{_META}{name}")

    tls = None
    if given("tls") or given("tls_ca") or given("tls_cert") or given("tls_key"):
        tls = TlsOptions(given("tls_ca"), given("tls_cert"), given("tls_key"))
    return Session(
        Output(as_json=bool(given("json"))),
        given("compiler"),
        given("runtime"),
        tls,
        token_path=given("token_file"),
        may_expose_token=bool(given("allow_plaintext_token")),
    )
