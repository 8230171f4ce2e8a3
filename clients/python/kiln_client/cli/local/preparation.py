"""Makes a model ready to answer: finds it, compiles it if the cache lacks it, and loads it unless it is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
from kiln.bundle.v1.bundle_pb2 import Bundle
from kiln.compiler.v1.compiler_pb2 import CACHE_RESULT_HIT, CompileRequest, CompileResponse, PlanCompileRequest
from kiln.runtime.v1.runtime_pb2 import Deployment

from kiln_client.bundles import AsyncBundles
from kiln_client.cli.local.configuration import Configuration, Given, configure
from kiln_client.cli.local.loading import AUTO, CompiledModel, is_idle, load_model
from kiln_client.cli.local.lookup import Checkpoint, HubModel, find_checkpoint, find_named, name_of
from kiln_client.cli.local.pull import pull
from kiln_client.cli.output import Output
from kiln_client.cli.progress import ProgressView
from kiln_client.compile_requests import compile_request
from kiln_client.compiler import AsyncCompiler
from kiln_client.errors import KilnError, NotFound
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import StackRecord, make_home

#: Behind the names of the bundle and the deployment of a quick start.
_QUICK: Final = "-quick"
#: Weights of models whose graphs answer sooner by more than they cost; docs/performance.md has the times.
MAX_QUICK_WEIGHTS_BYTES: Final = 256 << 20


def find_here(output: Output, model: str, model_roots: Sequence[Path], home: Path, *, yes: bool) -> Checkpoint | None:
    """Finds a checkpoint without the services; downloads it to the home, after asking, if only the Hub may have it.

    Returns None if `model` may be a bundle, which the compiler knows.
    """
    found = find_checkpoint(model, model_roots)
    if isinstance(found, HubModel):
        make_home(home)
        return Checkpoint.open(pull(output, found.repo_id, home / "models", yes=yes).path)
    return found


@dataclass(frozen=True, slots=True)
class _Build:
    """What a compile of a checkpoint is to make: its bundle is called `NAME.auto`, so that NAME goes on to mean the
    checkpoint, as it is when it is asked for."""

    name: str
    configuration: Configuration
    request: CompileRequest

    def take(self, response: CompileResponse) -> CompiledModel:
        ref = f"{response.name}:v{response.version}"
        return CompiledModel(self.name, ref, response.digest, self.configuration.num_ranks)


@dataclass(frozen=True, slots=True)
class Preparation:
    """The way of one model to a deployment.

    Attributes:
        batch_size: Rows of the KV cache, if the person gives none.
        may_replace: Whether idle deployments are unloaded that are in the way, as `load_model` says.
        deployment_id: Id that the deployment must have; None takes one after the model.
    """

    services: StackRecord
    given: Given
    batch_size: int
    view: ProgressView
    may_replace: bool
    deployment_id: str | None = None

    async def prepare(self, model: Checkpoint | str) -> Deployment:
        """Makes a model ready to answer: a checkpoint, or what a person wrote, if `find_here` does not know it."""
        found = await self._find(model)
        return await self.load(found) if isinstance(found, CompiledModel) else await self._make(await self.plan(found))

    async def prepare_quickly(self, model: Checkpoint | str) -> Deployment | QuickStart:
        """As `prepare`, as soon as it can be: something answers until the model is compiled, if that is quicker and
        the person says nothing of the configuration."""
        found = await self._find(model)
        if isinstance(found, CompiledModel):
            return await self.load(found)
        build = await self.plan(found)
        if not self.given.says_something and await self._is_quicker(build):
            return await self._start_quickly(found, build)
        return await self._make(build)

    async def plan(self, model: Checkpoint, suffix: str = "") -> _Build:
        """Configures a checkpoint for this host; `suffix` is behind the names of the bundle and the deployment."""
        async with self.runtime() as runtime:
            memory_bytes = (await runtime.get_server_info()).total_memory_bytes
        async with self.compiler() as compiler:
            configuration = await configure(
                compiler, model, self.given, batch_size=self.batch_size, memory_bytes=memory_bytes
            )
        name = f"{model.name}{suffix}"
        request = compile_request(f"{name}{AUTO}", str(model.path), configuration.document, **self.given.build_options)
        return _Build(name, configuration, request)

    async def compile(self, build: _Build) -> CompiledModel:
        """Compiles a checkpoint, or finds the bundle in the cache. Cancelling it cancels the compile."""
        self.view.configured(build.configuration.document, build.configuration.derived)
        async with self.compiler() as compiler:
            response = await compiler.compile(build.request, on_progress=self.view.compiled, on_lost=self.view.lost)
        return build.take(response)

    async def load(self, model: CompiledModel) -> Deployment:
        """Loads a bundle, or finds the deployment that serves it."""
        return await load_model(
            self.services, model, self.view, may_replace=self.may_replace, deployment_id=self.deployment_id
        )

    async def end(self, deployment_id: str) -> None:
        """Unloads a deployment if it is there, and idle."""
        async with self.runtime() as runtime:
            for deployment in await runtime.list_deployments():
                if deployment.id == deployment_id and is_idle(deployment):
                    with suppress(NotFound):  # another command is as quick
                        await runtime.unload_bundle(deployment_id)

    def compiler(self) -> AsyncCompiler:
        """Opens a client of the compiler."""
        return AsyncCompiler(self.services.compiler, **self.services.connection)

    def runtime(self) -> AsyncRuntime:
        """Opens a client of the runtime."""
        return AsyncRuntime(self.services.runtime, **self.services.connection)

    async def _find(self, model: Checkpoint | str) -> Checkpoint | CompiledModel:
        if isinstance(model, Checkpoint):
            return model
        roots = [Path(root) for root in self.services.model_roots]
        async with AsyncBundles(self.services.compiler, **self.services.connection) as bundles:
            found = await find_named(model, bundles, roots)
        if isinstance(found, Checkpoint):
            return found
        if self.given.says_something:
            raise click.UsageError(f"{model} is a bundle: --config, --override, --adapter and -O come too late")
        return _take_bundle(model, found)

    async def _make(self, build: _Build) -> Deployment:
        deployment = await self.load(await self.compile(build))
        await self.end(f"{build.name}{_QUICK}")  # an earlier command may have left it
        return deployment

    async def _is_quicker(self, build: _Build) -> bool:
        """Whether a model's graphs answer sooner than its code: the cache lacks the code, and the model is small."""
        request = build.request
        same = PlanCompileRequest(
            model=request.model,
            config_json=request.config_json,
            target=request.target,
            optimization_level=request.optimization_level,
        )
        async with self.compiler() as compiler:
            plan = await compiler.plan_compile(same)
        is_compiled = all(executable.cache == CACHE_RESULT_HIT for executable in plan.executables)
        return not is_compiled and sum(rank.weights_bytes for rank in plan.ranks) <= MAX_QUICK_WEIGHTS_BYTES

    async def _start_quickly(self, model: Checkpoint, build: _Build) -> QuickStart:
        own = replace(
            self,
            given=replace(self.given, optimization_level=0, is_quick=True),
            batch_size=build.configuration.document["neuron_config"]["batch_size"],
            may_replace=True,
        )
        deployment = await own.load(await own.compile(await own.plan(model, _QUICK)))
        return QuickStart(own, build, deployment)


class QuickStart:
    """A first answer while the compiler works: a model's graphs answer as they are, until code of them takes over.

    The deployment that answers now takes short prompts.
    """

    def __init__(self, preparation: Preparation, build: _Build, deployment: Deployment) -> None:
        self.deployment = deployment
        self._preparation = preparation
        self._build = build
        self._operation = ""

    async def compile(self) -> None:
        """Starts the compile of what takes over. It goes on in the compiler, also when this process has ended."""
        async with self._preparation.compiler() as compiler:
            self._operation = (await compiler.start_compile(self._build.request)).name

    async def is_compiled(self) -> bool:
        """Whether the compile has ended; not if the compiler does not say so."""
        async with self._preparation.compiler() as compiler:
            with suppress(KilnError):
                return bool((await compiler.get_operation(self._operation)).done)
        return False

    async def take_over(self, view: ProgressView) -> Deployment:
        """Waits for the compile, loads what takes over, and ends what answers now, which goes on if this fails."""
        if not self._operation:
            await self.compile()
        async with self._preparation.compiler() as compiler:
            response = await compiler.wait_compile(self._operation, on_progress=view.compiled, on_lost=view.lost)
        successor = await replace(self._preparation, view=view).load(self._build.take(response))
        await self._preparation.end(self.deployment.id)
        return successor


def _take_bundle(ref: str, bundle: Bundle) -> CompiledModel:
    name = name_of(bundle.name or bundle.digest.removeprefix("sha256:")[:12])
    return CompiledModel(name, ref, bundle.digest, json.loads(bundle.manifest_json)["tp_degree"])
