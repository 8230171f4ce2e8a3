"""A compiler that is killed and started again, and what it is told to do meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import tokenizers
from google.longrunning import operations_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.layout import Layout
from bundle.reader import open_bundle
from tests.bundles.samples import publish_sample
from tests.checkpoints.random_weights import write_checkpoint
from tests.checkpoints.tokenizer_sources import train_sentencepiece
from tests.processes import living_descendants
from tests.servers.compiler_process import CompilerProcess, run_compiler, wait_until_gone
from tests.servers.running_compiler import response_of

CONFIG: Final = {
    "neuron_config": {
        "seq_len": 16,
        "max_context_length": 8,
        "enable_bucketing": True,
        "context_encoding_buckets": [8],
        "token_generation_buckets": [12, 16],
    }
}
_SMALL: Final = {"neuron_config": CONFIG["neuron_config"] | {"token_generation_buckets": [16]}}
#: Its golden check runs in ranks; that of one rank runs in the build itself.
_PAIR: Final = {"neuron_config": _SMALL["neuron_config"] | {"tp_degree": 2}}


class RestartedCompiler:
    """One compiler at a time on one home."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self._options = options
        self._context = AsyncExitStack()
        self.running: CompilerProcess
        #: Whether it has the bundle whose executables `shard` takes.
        self.has_base = False

    @property
    def pid(self) -> int:
        return self.running.process.pid

    async def start(self) -> None:
        self._context = AsyncExitStack()
        self.running = await self._context.enter_async_context(run_compiler(self.home, *self._options))

    async def stop(self) -> None:
        await self._context.aclose()

    def find(self, victim: str) -> list[psutil.Process]:
        """The living processes of a name; `compiler` is the service itself."""
        return [psutil.Process(self.pid)] if victim == "compiler" else self.running.find(victim)

    async def kill(self, victim: str) -> bool:
        """Kills a process of that name, the compiler with everything below it; returns whether there was one.

        A compiler that is killed is started again.
        """
        followers = living_descendants(self.pid) if victim == "compiler" else []
        for process in self.find(victim)[:1]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                await wait_until_gone(*followers)
                if victim == "compiler":
                    await self.stop()
                    await self.start()
                return True
        return False


@dataclass
class Outcome:
    """How an action ended.

    Attributes:
        reason: Empty if it succeeded; `INTERRUPTED` if the caller lost the service.
    """

    reason: str = ""
    detail: str = field(default="", compare=False)


#: Does something: `NUMBER/ATTEMPT` says what, and all attempts at a number do the same. It calls the function when it
#: begins, with the name of its operation if it has one.
Action = Callable[[RestartedCompiler, str, Callable[[str], None]], Coroutine[Any, Any, Outcome]]


def reason_of(status: object) -> str:
    """The reason of a failed call's or operation's status."""
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details), status  # type: ignore[attr-defined]
    return str(info.reason)


async def finish(compiler: RestartedCompiler, name: str) -> Outcome:
    """Waits for an operation, across restarts of the compiler."""
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        request = operations_pb2.WaitOperationRequest(name=name)
        try:
            operation = await compiler.running.client.operations.WaitOperation(request, timeout=110)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError):
            await asyncio.sleep(0.1)
            continue
        if operation.done:
            is_failed = operation.WhichOneof("result") == "error"
            return Outcome(reason_of(operation.error), str(operation.error.message)) if is_failed else Outcome()
    raise AssertionError(f"{name} does not end")


async def call(awaitable: Awaitable[object]) -> Outcome:
    """The outcome of a call."""
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)
        return Outcome("INTERRUPTED" if status is None else reason_of(status), str(error.details()))
    except (grpc.aio.UsageError, asyncio.CancelledError):
        # The channel was closed with the compiler that it led to.
        return Outcome("INTERRUPTED")
    return Outcome()


def number_of(identity: str) -> str:
    return identity.partition("/")[0]


async def build(
    config: Mapping[str, object],
    level: pb.OptimizationLevel.ValueType,
    compiler: RestartedCompiler,
    identity: str,
    announce: Callable[[str], None],
    *,
    model: str = "tiny",
) -> Outcome:
    """Compiles a bundle of its own: the salt is part of every cache key."""
    operation = await compiler.running.client.compile(
        model=model,
        config_json=json.dumps(config),
        optimization_level=level,
        request_id=identity,
        salt=number_of(identity),
    )
    announce(operation.name)
    return await finish(compiler, operation.name)


def provide_untokenized(home: Path) -> None:
    """Writes the checkpoint whose tokenizer `convert` converts."""
    path = write_checkpoint(home / "models" / "untokenized")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(train_sentencepiece("llama"))


async def convert(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    """Compiles a bundle whose tokenizer is converted, and loads that."""
    operation = ""

    def announce_and_note(name: str) -> None:
        nonlocal operation
        operation = name
        announce(name)

    outcome = await build(_SMALL, pb.OPTIMIZATION_LEVEL_O0, compiler, identity, announce_and_note, model="untokenized")
    if outcome == Outcome():
        response = response_of(await compiler.running.client.get(operation))
        bundle = open_bundle(Layout(compiler.home / "store"), response.digest)
        assert bundle.manifest.tokenizer is not None
        tokenizer = tokenizers.Tokenizer.from_file(str(bundle.blob_path(bundle.manifest.tokenizer.digest)))
        text = "Once upon a time"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    return outcome


async def provide_base(compiler: RestartedCompiler) -> None:
    """Compiles the bundle whose executables `shard` takes."""
    operation = await compiler.running.client.compile(
        name="base", config_json=json.dumps(CONFIG), optimization_level=pb.OPTIMIZATION_LEVEL_O0
    )
    assert await finish(compiler, operation.name) == Outcome()
    compiler.has_base = True


async def shard(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    request = pb.ShardWeightsRequest(
        name="tiny", model="tiny", executables_ref="base:v1", request_id=identity, skip_cache_lookup=True
    )
    operation = await compiler.running.client.compiler.ShardWeights(request)
    announce(operation.name)
    return await finish(compiler, operation.name)


async def plan(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    announce("")
    request = pb.PlanCompileRequest(model="tiny", config_json=json.dumps(CONFIG))
    return await call(compiler.running.client.compiler.PlanCompile(request))


async def plan_url(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    """Plans a checkpoint that a process fetches the outline of."""
    announce("")
    url = f"file://{compiler.home / 'models' / 'tiny'}"
    return await call(compiler.running.client.compiler.PlanCompile(pb.PlanCompileRequest(model=url, config_json="{}")))


async def import_(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    digest = publish_sample(Layout.create(compiler.home / "source"), version=number_of(identity))
    announce("")
    return await call(_import(compiler, "imported", digest, alias="new"))


async def collect(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    """Collects a bundle that no version names."""
    publish_sample(Layout(compiler.home / "store"), version=number_of(identity))
    announce("")
    return await call(compiler.running.client.bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest()))


async def delete(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    """Deletes a bundle that it has imported."""
    digest = publish_sample(Layout.create(compiler.home / "source"), version=number_of(identity))
    version = await _import(compiler, "deleted", digest)
    announce("")
    request = bundle_pb2.DeleteBundleRequest(ref=f"deleted:v{version}")
    return await call(compiler.running.client.bundles.DeleteBundle(request))


async def _import(compiler: RestartedCompiler, name: str, digest: str, *, alias: str = "") -> int:
    """Imports a bundle and returns its version."""
    layout = str(compiler.home / "source")
    request = bundle_pb2.ImportBundleRequest(layout=layout, source_ref=digest, name=name, alias=alias)
    events = [event async for event in compiler.running.client.bundles.ImportBundle(request)]
    return int(events[-1].result.bundle.version)


ACTIONS: Final[Mapping[str, Action]] = {
    "compile": partial(build, CONFIG, pb.OPTIMIZATION_LEVEL_O0),
    "lower": partial(build, _SMALL, pb.OPTIMIZATION_LEVEL_O1),
    "compile for two ranks": partial(build, _PAIR, pb.OPTIMIZATION_LEVEL_O0),
    "convert": convert,
    "shard": shard,
    "plan": plan,
    "plan a URL": plan_url,
    "import": import_,
    "collect": collect,
    "delete": delete,
}
