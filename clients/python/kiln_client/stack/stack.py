"""Runs the two services of one home directory, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from kiln_client.endpoint import TlsOptions, is_local
from kiln_client.stack.home import StackRecord, announced, locked_home, make_home
from kiln_client.stack.issuer import ISSUER, jwks_path, keep_home_token, renew_home_token, token_path
from kiln_client.stack.service_process import Service, ServiceProcess, first_of, reachable_address

#: Services of one host compile for its processor: their bundles do not travel unless a person says so.
DEFAULT_ISA: Final = "native"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class StackTls:
    """Files for TLS, in PEM. Both services use the same ones.

    Attributes:
        certificate_path: Certificate chain of both services. If clients need a certificate, the runtime presents it to
            the compiler too, and `kiln up` presents it to both.
        key_path: Private key of the certificate.
        ca_path: Authorities that have signed the certificate.
        client_ca_path: Authorities that must have signed clients' certificates; None requires no client certificates.
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


@dataclass(frozen=True, slots=True)
class StackConfig:
    """The configuration of both services for `kiln up`.

    Attributes:
        home: Directory of all state; created if it is missing.
        compiler_address: `host:port` to bind; port 0 takes a free one.
        runtime_address: `host:port` to bind; port 0 takes a free one.
        num_cores: Logical cores of the runtime; None takes the runtime's default, all cores of the host.
        threads_per_core: Number of threads of each rank; None takes the runtime's default.
        warm_threads: Threads of ranks for which the runtime loads what they need at its start; None loads nothing.
        memory: Memory for deployments, such as `6GiB`; None takes the runtime's default.
        deployments_path: File that declares the runtime's deployments; None leaves them to calls.
        capture_path: Directory of captured inputs; None allows no captures.
        model_roots: Directories of checkpoints, besides `home`/models.
        import_roots: Directories of layouts from which bundles may be imported.
        tls: Files for TLS; None serves in plaintext.
        ready_timeout_s: Seconds in which a service must become healthy.
        stop_timeout_s: Seconds in which a service must end before it is killed.
        engine_deployment: Deployment that the runtime's vLLM engine API speaks for; None for the only one that serves.
        allow_insecure: Whether the services may serve beyond loopback in plaintext and without authentication.
        require_auth: Whether the services ask for a token on loopback, too.
        is_detached: Whether the stack runs in the background, for `kiln run`.
        default_isa: CPU instruction set of compiles that name none.
        target: Hardware of this host, such as `trn2`; None takes the runtime's default.
        logical_core_size: Physical cores of a logical core; None takes the runtime's default.
        neuron_python: Python with Neuron's packages, for the compiler; None takes the compiler's default.
    """

    home: Path
    compiler_address: str
    runtime_address: str
    num_cores: int | None
    threads_per_core: int | None
    memory: str | None
    deployments_path: Path | None
    capture_path: Path | None
    model_roots: tuple[Path, ...]
    import_roots: tuple[Path, ...]
    tls: StackTls | None
    ready_timeout_s: float
    stop_timeout_s: float
    engine_deployment: str | None = None
    allow_insecure: bool = False
    require_auth: bool = False
    is_detached: bool = False
    default_isa: str = DEFAULT_ISA
    target: str | None = None
    logical_core_size: int | None = None
    neuron_python: Path | None = None
    warm_threads: int | None = None

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

    def with_engine_deployment(self, deployment_id: str) -> StackConfig:
        """Returns this configuration with a runtime whose vLLM engine API speaks for one deployment."""
        return replace(self, engine_deployment=deployment_id)

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


COMPILER = Service("compiler", "compiler_svc", "kiln-compiler", kind="compiler")
RUNTIME = Service("runtime", "runtime_svc", "kiln-runtime")


async def run_stack(
    config: StackConfig,
    on_ready: Callable[[StackAddresses], None],
    work: Callable[[StackAddresses], Awaitable[None]] | None = None,
) -> None:
    """Starts both services, reports them, and stops them on SIGTERM, SIGINT or SIGHUP.

    Args:
        config: The configuration of both services.
        on_ready: Called when both are healthy.
        work: Runs beside the services, after `on_ready`. The services go on when it ends; if it raises, they stop.

    Raises:
        ServiceNotInstalled: A service's module is missing, or what signs tokens.
        HomeNotPrivate: Other users may enter the home directory, which belongs to one of them.
        HomeInUse: Another process serves the home directory.
        TokenNotMade: The key of the home cannot be read, or its token not be written.
        ServiceNotReady: A service did not become healthy in time.
        ServiceExited: A service has ended by itself. The other one has been stopped.
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
        *("--default-isa", config.default_isa),
        *_option_words({"--neuron-python": config.neuron_python}),
        *(word for root in config.all_model_roots for word in ("--model-root", str(root))),
        *(word for root in config.import_roots for word in ("--import-root", str(root))),
    ]


def _runtime_arguments(config: StackConfig, compiler_address: str) -> list[str]:
    given = {
        "--cores": config.num_cores,
        "--target": config.target,
        "--logical-core-size": config.logical_core_size,
        "--threads-per-core": config.threads_per_core,
        "--warm-threads": config.warm_threads,
        "--memory": config.memory,
        "--deployments": config.deployments_path,
        "--capture-directory": config.capture_path,
        "--engine-deployment": config.engine_deployment,
    }
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
        *_option_words(given),
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


def _option_words(options: Mapping[str, object]) -> list[str]:
    """Makes the command-line words of the options that have a value."""
    return [word for name, value in options.items() if value is not None for word in (name, str(value))]


def _make_directories(config: StackConfig) -> None:
    make_home(config.home)
    caches = (config.cache_path / service.name for service in (COMPILER, RUNTIME))
    for path in (config.models_path, config.store_path, config.state_path, config.logs_path, *caches):
        path.mkdir(parents=True, exist_ok=True)
