"""Runs the two services of one home directory, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from kiln_client.endpoint import TlsOptions, is_local
from kiln_client.stack.home import StackRecord, announced, locked_home, make_home
from kiln_client.stack.issuer import ISSUER, jwks_path, keep_home_token, renew_home_token, token_path
from kiln_client.stack.service_process import Service, ServiceProcess, first_of, reachable_address

COMPILER = Service("compiler", "compiler_svc", "kiln-compiler", kind="compiler")
RUNTIME = Service("runtime", "runtime_svc", "kiln-runtime")

#: Services of one host compile for its processor: their bundles do not travel unless a person says so.
DEFAULT_ISA: Final = "native"
READY_TIMEOUT_S: Final = 120
STOP_TIMEOUT_S: Final = 45
#: Exit code of services in the background if another process serves the home.
LOCKED_OUT: Final = 3
_FREE_PORT: Final = "127.0.0.1:0"

#: The runtime counts cores and pins nothing to them: models that wait for requests take turns on the processors.
_LEAST_CORES: Final = 16

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class StackTls:
    """Files for TLS, in PEM. Both services use the same ones.

    If clients need a certificate, the runtime presents this one to the compiler too, and `kiln up` presents it to both.
    """

    certificate_path: Path
    key_path: Path
    ca_path: Path
    client_ca_path: Path | None = None

    def client_options(self) -> TlsOptions:
        """Options with which clients within the stack connect to its services."""
        if self.client_ca_path is None:
            return TlsOptions(self.ca_path)
        return TlsOptions(self.ca_path, self.certificate_path, self.key_path)


def _option_of(service: Service, default: Any = None) -> Any:
    """Makes a field that a service takes as its option of the same name; None leaves the value to the service."""
    return field(default=default, metadata={"service": service})


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The configuration of both services of one home.

    Attributes:
        home: Directory of all state; created if it is missing.
        model_roots: Directories of checkpoints, besides `home`/models.
        import_roots: Directories of layouts from which bundles may be imported.
        tls: Files for TLS; None serves in plaintext.
        ready_timeout_s: Time in which a service must become healthy.
        stop_timeout_s: Time in which a service must end before it is killed.
        allow_insecure: Whether the services may serve beyond loopback in plaintext and without authentication.
        require_auth: Whether the services ask for a token on loopback, too.
        engine_adapters: Of the runtime's option `--engine-adapter`, each `NAME=HOST:PORT`.
        is_detached: Whether the stack runs in the background, for `kiln run`.
    """

    home: Path
    compiler_address: str = _FREE_PORT
    runtime_address: str = _FREE_PORT
    default_isa: str = _option_of(COMPILER, DEFAULT_ISA)
    neuron_python: Path | None = _option_of(COMPILER)
    model_roots: tuple[Path, ...] = ()
    import_roots: tuple[Path, ...] = ()
    cores: int | None = _option_of(RUNTIME)
    target: str | None = _option_of(RUNTIME)
    logical_core_size: int | None = _option_of(RUNTIME)
    threads_per_core: int | None = _option_of(RUNTIME)
    warm_threads: int | None = _option_of(RUNTIME)
    memory: str | None = _option_of(RUNTIME)
    deployments: Path | None = _option_of(RUNTIME)
    capture_directory: Path | None = _option_of(RUNTIME)
    engine_deployment: str | None = _option_of(RUNTIME)
    engine_adapters: tuple[str, ...] = ()
    tls: StackTls | None = None
    ready_timeout_s: float = READY_TIMEOUT_S
    stop_timeout_s: float = STOP_TIMEOUT_S
    allow_insecure: bool = False
    require_auth: bool = False
    is_detached: bool = False

    @classmethod
    def for_one_person(cls, home: Path, **given: Any) -> StackConfig:
        """Makes the configuration of `kiln serve` and of what `kiln run` starts: models share the host's processors."""
        return cls(
            home=home,
            cores=max(_LEAST_CORES, os.cpu_count() or 1),
            # Models of one rank, which is most, get every processor that there is.
            warm_threads=len(os.sched_getaffinity(0)),
            **given,
        )

    @property
    def store_path(self) -> Path:
        """The bundle store, which the services share."""
        return self.home / "store"

    @property
    def cache_path(self) -> Path:
        """Parent of each service's cache."""
        return self.home / "cache"

    @property
    def state_path(self) -> Path:
        """Directory of the state that the runtime keeps over a restart."""
        return self.home / "state" / RUNTIME.name

    @property
    def models_path(self) -> Path:
        """The model root that always exists."""
        return self.home / "models"

    @property
    def all_model_roots(self) -> tuple[Path, ...]:
        """Every directory of checkpoints."""
        return (self.models_path, *self.model_roots)

    def with_model_roots(self, model_roots: Iterable[Path]) -> StackConfig:
        """Returns this configuration with more model roots."""
        return replace(self, model_roots=(*self.model_roots, *model_roots))

    @property
    def logs_path(self) -> Path:
        """Directory of the services' logs."""
        return self.home / "logs"


@dataclass(frozen=True, slots=True)
class StackAddresses:
    """The addresses to which the services are bound."""

    compiler: str
    runtime: str


async def run_stack(
    config: StackConfig,
    on_ready: Callable[[StackAddresses], None],
    work: Callable[[StackAddresses], Awaitable[None]] | None = None,
) -> None:
    """Starts both services, reports them, and stops them on SIGTERM, SIGINT or SIGHUP.

    `on_ready` is called when both are healthy, then `work` runs beside the services. They go on when it ends; if it
    raises, they stop.
    """
    for service in (COMPILER, RUNTIME, ISSUER):
        service.require_installed()
    _make_directories(config)
    with locked_home(config.home):
        started: list[ServiceProcess] = []
        serving = asyncio.create_task(_serve(config, started, on_ready, work))
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            await asyncio.gather(*(process.stop(config.stop_timeout_s) for process in started))


async def _serve(
    config: StackConfig,
    started: list[ServiceProcess],
    on_ready: Callable[[StackAddresses], None],
    work: Callable[[StackAddresses], Awaitable[None]] | None,
) -> None:
    async def start(service: Service, arguments: Sequence[str]) -> ServiceProcess:
        process = await ServiceProcess.start(service, arguments, config.logs_path / f"{service.name}.log")
        started.append(process)
        return process

    tls = None if config.tls is None else config.tls.client_options()
    await renew_home_token(config.home)
    compiler = await start(COMPILER, _compiler_arguments(config))
    compiler_address = await compiler.ready(config.ready_timeout_s, tls)
    runtime = await start(RUNTIME, _runtime_arguments(config, compiler_address))
    runtime_address = await first_of(runtime.ready(config.ready_timeout_s, tls), compiler.failure())
    addresses = StackAddresses(compiler_address, runtime_address)

    async def work_and_stay() -> NoReturn:
        if work is not None:
            await work(addresses)
        await asyncio.Future()
        raise AssertionError("the future has no result")

    with announced(config.home, _record(config, addresses)):
        on_ready(addresses)
        await first_of(compiler.failure(), runtime.failure(), work_and_stay(), keep_home_token(config.home))


def _record(config: StackConfig, addresses: StackAddresses) -> StackRecord:
    compiler, runtime = reachable_address(addresses.compiler), reachable_address(addresses.runtime)
    # Beyond loopback, a token would be sent for all to read; services in plaintext there ask for none.
    is_private = config.tls is not None or (is_local(compiler) and is_local(runtime))
    return StackRecord(
        pid=os.getpid(),
        compiler=compiler,
        runtime=runtime,
        model_roots=tuple(str(root.resolve()) for root in config.all_model_roots),
        is_detached=config.is_detached,
        tls=None if config.tls is None else config.tls.client_options(),
        token_path=token_path(config.home) if is_private else None,
    )


def _compiler_arguments(config: StackConfig) -> list[str]:
    return [
        *("--address", config.compiler_address),
        *("--log-file", str(config.logs_path / f"{COMPILER.name}.log")),
        *_access_arguments(config),
        *_server_tls_arguments(config.tls),
        *("--store", str(config.store_path)),
        *("--database", f"sqlite:///{config.home / 'kiln.db'}"),
        *("--cache", str(config.cache_path / COMPILER.name)),
        *_own_options(config, COMPILER),
        *(word for root in config.all_model_roots for word in ("--model-root", str(root))),
        *(word for root in config.import_roots for word in ("--import-root", str(root))),
    ]


def _runtime_arguments(config: StackConfig, compiler_address: str) -> list[str]:
    return [
        *("--address", config.runtime_address),
        *("--log-file", str(config.logs_path / f"{RUNTIME.name}.log")),
        *_access_arguments(config),
        *_server_tls_arguments(config.tls),
        *("--compiler", reachable_address(compiler_address)),
        *_compiler_tls_arguments(config.tls),
        *("--compiler-token-file", str(token_path(config.home))),
        *("--bundle-store", str(config.store_path)),
        *("--cache", str(config.cache_path / RUNTIME.name)),
        *("--state", str(config.state_path)),
        *_own_options(config, RUNTIME),
        *(word for one in config.engine_adapters for word in ("--engine-adapter", one)),
    ]


def _access_arguments(config: StackConfig) -> list[str]:
    return [
        *("--auth-jwks", str(jwks_path(config.home))),
        *(["--require-auth"] if config.require_auth else []),
        *(["--allow-insecure", "--allow-anonymous"] if config.allow_insecure else []),
    ]


def _server_tls_arguments(tls: StackTls | None) -> list[str]:
    if tls is None:
        return []
    return _option_words(
        {"--tls-certificate": tls.certificate_path, "--tls-key": tls.key_path, "--tls-client-ca": tls.client_ca_path}
    )


def _compiler_tls_arguments(tls: StackTls | None) -> list[str]:
    if tls is None:
        return []
    client = tls.client_options()
    return _option_words(
        {
            "--compiler-ca": client.ca_path,
            "--compiler-certificate": client.certificate_path,
            "--compiler-key": client.key_path,
        }
    )


def _own_options(config: StackConfig, service: Service) -> list[str]:
    own = (one.name for one in fields(config) if one.metadata.get("service") is service)
    return _option_words({f"--{name.replace('_', '-')}": getattr(config, name) for name in own})


def _option_words(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() if value is not None for word in (name, str(value))]


def _make_directories(config: StackConfig) -> None:
    make_home(config.home)
    caches = (config.cache_path / service.name for service in (COMPILER, RUNTIME))
    for path in (config.models_path, config.store_path, config.state_path, config.logs_path, *caches):
        path.mkdir(parents=True, exist_ok=True)
