"""The two services of one home directory, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kiln_client.errors import HomeInUse
from kiln_client.stack.service_process import Service, ServiceProcess, first_of

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What `kiln up` starts.

    Attributes:
        home: Directory of all state; made where it is missing.
        compiler_address: `host:port` to bind; port 0 takes a free one.
        runtime_address: `host:port` to bind; port 0 takes a free one.
        num_cores: Logical cores of the runtime.
        model_roots: Directories of checkpoints, besides `home`/models.
        ready_timeout_s: How long a service may take to become healthy.
        stop_timeout_s: How long a service may take to end before it is killed.
    """

    home: Path
    compiler_address: str
    runtime_address: str
    num_cores: int
    model_roots: tuple[Path, ...]
    ready_timeout_s: float
    stop_timeout_s: float

    @property
    def store_path(self) -> Path:
        """The bundle store, which the services share."""
        return self.home / "store"

    @property
    def cache_path(self) -> Path:
        """Parent of each service's cache."""
        return self.home / "cache"

    @property
    def models_path(self) -> Path:
        """The model root that is always there."""
        return self.home / "models"

    @property
    def logs_path(self) -> Path:
        """Directory of the services' logs."""
        return self.home / "logs"


@dataclass(frozen=True, slots=True)
class StackAddresses:
    """Where the services listen, as bound."""

    compiler: str
    runtime: str


COMPILER = Service("compiler", "compiler_svc", "kiln-compiler")
RUNTIME = Service("runtime", "runtime_svc", "kiln-runtime")


async def run_stack(config: StackConfig, on_ready: Callable[[StackAddresses], None]) -> None:
    """Starts both services, reports them, and stops them on SIGTERM, SIGINT or SIGHUP.

    Raises:
        ServiceNotInstalled: A service's module is missing.
        HomeInUse: Another process serves the home directory.
        ServiceNotReady: A service did not become healthy in time.
        ServiceExited: A service ended by itself; the other one has been stopped.
    """
    for service in (COMPILER, RUNTIME):
        service.require_installed()
    with _locked_home(config):
        started: list[ServiceProcess] = []
        serving = asyncio.create_task(_serve(config, started, on_ready))
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            await asyncio.gather(*(process.stop(config.stop_timeout_s) for process in started))


async def _serve(
    config: StackConfig, started: list[ServiceProcess], on_ready: Callable[[StackAddresses], None]
) -> None:
    async def start(service: Service, arguments: Sequence[str]) -> ServiceProcess:
        process = await ServiceProcess.start(service, arguments, config.logs_path / f"{service.name}.log")
        started.append(process)
        return process

    compiler = await start(COMPILER, _compiler_arguments(config))
    compiler_address = await compiler.ready(config.ready_timeout_s)
    runtime = await start(RUNTIME, _runtime_arguments(config, compiler_address))
    runtime_address = await first_of(runtime.ready(config.ready_timeout_s), compiler.failure())
    on_ready(StackAddresses(compiler_address, runtime_address))
    await first_of(compiler.failure(), runtime.failure())


def _compiler_arguments(config: StackConfig) -> list[str]:
    return [
        *("--address", config.compiler_address),
        *("--store", str(config.store_path)),
        *("--database", f"sqlite:///{config.home / 'kiln.db'}"),
        *("--cache", str(config.cache_path / COMPILER.name)),
        *(word for root in (config.models_path, *config.model_roots) for word in ("--model-root", str(root))),
    ]


def _runtime_arguments(config: StackConfig, compiler_address: str) -> list[str]:
    return [
        *("--address", config.runtime_address),
        *("--compiler", compiler_address),
        *("--bundle-store", str(config.store_path)),
        *("--cache", str(config.cache_path / RUNTIME.name)),
        *("--cores", str(config.num_cores)),
    ]


@contextlib.contextmanager
def _locked_home(config: StackConfig) -> Iterator[None]:
    caches = (config.cache_path / service.name for service in (COMPILER, RUNTIME))
    for path in (config.models_path, config.store_path, config.logs_path, *caches):
        path.mkdir(parents=True, exist_ok=True)
    with (config.home / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HomeInUse(config.home) from None
        yield
