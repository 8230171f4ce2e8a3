"""A first answer while the compiler works: a model's graphs answer as they are, until code made of them takes over."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final, Self

from kiln.compiler.v1.compiler_pb2 import CACHE_RESULT_HIT, PlanCompileRequest
from kiln.runtime.v1.runtime_pb2 import Deployment

from kiln_client.compiler import AsyncCompiler
from kiln_client.errors import KilnError, NotFound
from kiln_client.local.configuration import Given
from kiln_client.local.lookup import Checkpoint
from kiln_client.local.preparation import ModelBuild, Progress, compile_model, is_idle, load_model
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import StackRecord

#: Behind the names of the bundle and the deployment.
_SUFFIX: Final = "-quick"
#: Weights of models whose graphs answer sooner by more than they cost; docs/performance.md has the times.
MAX_WEIGHTS_BYTES: Final = 256 << 20


class QuickStart:
    """A deployment that answers now, and the one that takes over.

    Attributes:
        deployment: Answers now; its prompts are short.
    """

    def __init__(self, services: StackRecord, build: ModelBuild, deployment: Deployment) -> None:
        self.deployment = deployment
        self._services = services
        self._build = build
        self._operation = ""

    @classmethod
    async def open(
        cls, services: StackRecord, model: Checkpoint, given: Given, build: ModelBuild, *, progress: Progress
    ) -> Self:
        """Makes the deployment that answers now.

        Args:
            services: The services of the home.
            model: The checkpoint.
            given: What the person says of the configuration.
            build: What is to take over.
            progress: Told what happens.
        """
        quick = replace(given, optimization_level=0, is_quick=True)
        batch_size = build.configuration.document["neuron_config"]["batch_size"]
        own = await ModelBuild.plan(services, model, quick, batch_size=batch_size, suffix=_SUFFIX)
        compiled = await compile_model(services, own, progress=progress)
        deployment = await load_model(services, compiled, may_replace=True, progress=progress)
        return cls(services, build, deployment)

    async def compile(self) -> None:
        """Starts the compile of what takes over. It goes on in the compiler, also when this process has ended."""
        async with AsyncCompiler(self._services.compiler, **self._services.connection) as compiler:
            self._operation = (await compiler.start_compile(self._build.request)).name

    async def is_compiled(self) -> bool:
        """Whether the compile has ended; not if the compiler does not say so."""
        async with AsyncCompiler(self._services.compiler, **self._services.connection) as compiler:
            with suppress(KilnError):
                return bool((await compiler.get_operation(self._operation)).done)
        return False

    async def take_over(self, progress: Progress) -> Deployment:
        """Waits for the compile, loads what takes over, and ends what answers now.

        Args:
            progress: Told what happens.

        Raises:
            KilnError: The compile or the load failed; what answers goes on.
        """
        if not self._operation:
            await self.compile()
        async with AsyncCompiler(self._services.compiler, **self._services.connection) as compiler:
            response = await compiler.wait_compile(
                self._operation, on_progress=progress.compiled, on_lost=progress.lost
            )
        compiled = self._build.take(response)
        successor = await load_model(self._services, compiled, may_replace=True, progress=progress)
        await _end(self._services, self.deployment.id)
        return successor


async def is_quicker(services: StackRecord, build: ModelBuild) -> bool:
    """Whether a model's graphs answer sooner than its code: the cache lacks the code, and the model is small."""
    request = build.request
    same = PlanCompileRequest(
        model=request.model,
        config_json=request.config_json,
        target=request.target,
        optimization_level=request.optimization_level,
    )
    async with AsyncCompiler(services.compiler, **services.connection) as compiler:
        plan = await compiler.plan_compile(same)
    is_compiled = all(executable.cache == CACHE_RESULT_HIT for executable in plan.executables)
    return not is_compiled and sum(rank.weights_bytes for rank in plan.ranks) <= MAX_WEIGHTS_BYTES


async def end_quick(services: StackRecord, build: ModelBuild) -> None:
    """Unloads what answered for a model until it was compiled, if an earlier command has left it."""
    await _end(services, f"{build.name}{_SUFFIX}")


async def _end(services: StackRecord, deployment_id: str) -> None:
    async with AsyncRuntime(services.runtime, **services.connection) as runtime:
        for deployment in await runtime.list_deployments():
            if deployment.id == deployment_id and is_idle(deployment):
                with suppress(NotFound):  # another command is as quick
                    await runtime.unload_bundle(deployment_id)
