"""A compiler that is killed and started again, and what it is told to do meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import tokenizers
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.numpy import save_file

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from tests.bundles.samples import publish_sample
from tests.checkpoints.random_weights import CONFIG as MODEL_CONFIG
from tests.checkpoints.random_weights import random_tensors, write_checkpoint
from tests.checkpoints.tokenizer_sources import train_sentencepiece
from tests.hang_guard import HANG_S, until
from tests.processes import living_descendants
from tests.servers.answers import reason_in, reason_of
from tests.servers.compiler_process import CompilerProcess, run_compiler, wait_until_gone
from tests.servers.halt import SITE, Halt
from tests.servers.running_compiler import response_of
from tests.system.kills.kill import OPERATION, Death
from tests.system.kills.neuron_double import NEURON_CONFIG, NeuronDouble

CONFIG: Final = {
    "neuron_config": {
        "seq_len": 16,
        "max_context_length": 8,
        "enable_bucketing": True,
        "context_encoding_buckets": [4, 8],
        "token_generation_buckets": [16],
    }
}
_SMALL: Final = {"neuron_config": CONFIG["neuron_config"] | {"context_encoding_buckets": [8]}}
#: Its golden check runs in ranks; that of one rank runs in the build itself.
_PAIR: Final = {"neuron_config": _SMALL["neuron_config"] | {"tp_degree": 2}}
_FOUR: Final = {"seq_len": 16, "max_context_length": 8, "tp_degree": 4}
#: Large enough that a pass over it takes a while.
_LARGE: Final = {"hidden_size": 1024, "intermediate_size": 4096, "num_key_value_heads": 4}
#: A bundle with an alias, which no row may change.
KEPT_ALIAS: Final = "kept@prod"


class RestartedCompiler:
    """One compiler at a time on one home."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self._options = options
        self._context = AsyncExitStack()
        self.neuron = NeuronDouble(home)
        self.halt = Halt(home / "halt")
        self.running: CompilerProcess
        #: Whether it has the bundle whose executables `shard` takes.
        self.has_base = False
        #: What happens between a death of the compiler and its next start.
        self.before_restart: Callable[[], object] = lambda: None

    @property
    def pid(self) -> int:
        return self.running.process.pid

    async def start(self) -> None:
        self._context = AsyncExitStack()
        self.running = await self._context.enter_async_context(
            run_compiler(self.home, "--neuron-python", str(self.neuron.interpreter), *self._options, site=SITE)
        )

    async def stop(self) -> None:
        """Kills it, for an interrupted run has but seconds to say what it did; returns when all below it has ended."""
        self.halt.withdraw()
        followers = living_descendants(self.pid)
        with suppress(ProcessLookupError):
            self.running.process.kill()
        await self._context.aclose()
        await wait_until_gone(*followers)

    def find(self, victim: str) -> list[psutil.Process]:
        """The living processes of a name; `compiler` is the service itself."""
        return [psutil.Process(self.pid)] if victim == "compiler" else self.running.find(victim)

    async def strike(self, death: Death[Any], operation: str) -> None:
        """Sends the first process of the victim's name a signal, or cancels the operation, and lets others go on.

        With a compiler dies everything below it, also what stands still; it has to be started again.
        """
        halted = self.halt.find()
        if death.victim == OPERATION:
            await self.running.client.cancel(operation)
        else:
            followers = living_descendants(self.pid) if death.victim == "compiler" else []
            victim = (await until(lambda: self.find(death.victim)))[0]
            victim.send_signal(death.number)
        if halted and (death.victim == OPERATION or (halted != victim and death.victim != "compiler")):
            with suppress(psutil.NoSuchProcess):
                halted.resume()
        if death.victim == "compiler":
            await wait_until_gone(*followers, *self.neuron.find_processes())
            await self._context.aclose()
            self.before_restart()


@dataclass
class Outcome:
    """How an action ended.

    Attributes:
        reason: Empty if it succeeded; `INTERRUPTED` if the caller lost the service.
        detail: What the failure says.
        digest: Of the bundle, if an operation made one.
    """

    reason: str = ""
    detail: str = field(default="", compare=False)
    digest: str = field(default="", compare=False)


class ChannelClosed(Exception):
    """A call lost its channel with the compiler that it led to."""


#: Does something: `NUMBER/ATTEMPT` says what, and all attempts at a number do the same. It calls the function when it
#: begins, with the name of its operation if it has one.
Action = Callable[[RestartedCompiler, str, Callable[[str], None]], Coroutine[Any, Any, Outcome]]


async def finish(compiler: RestartedCompiler, name: str) -> Outcome:
    """Waits for an operation, across restarts of the compiler."""
    end_s = time.monotonic() + 5 * HANG_S
    while time.monotonic() < end_s:
        request = operations_pb2.WaitOperationRequest(name=name)
        try:
            with telling_closed_channel():
                operation = await compiler.running.client.operations.WaitOperation(request, timeout=110)
        except (grpc.aio.AioRpcError, ChannelClosed):
            await asyncio.sleep(0.1)
            continue
        if operation.done:
            if operation.WhichOneof("result") == "error":
                return Outcome(reason_in(operation.error), str(operation.error.message))
            if operation.response.Is(pb.QuantizeWeightsResponse.DESCRIPTOR):
                return Outcome()
            return Outcome(digest=response_of(operation).digest)
    raise AssertionError(f"{name} does not end")


async def call(awaitable: Awaitable[object]) -> Outcome:
    """The outcome of a call."""
    try:
        with telling_closed_channel():
            await awaitable
    except grpc.aio.AioRpcError as error:
        return Outcome(reason_of(error) or "INTERRUPTED", str(error.details()))
    except ChannelClosed:
        return Outcome("INTERRUPTED")
    return Outcome()


@contextmanager
def telling_closed_channel() -> Iterator[None]:
    """Tells a call that was cancelled because its channel was closed from one whose test is interrupted."""
    try:
        yield
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ChannelClosed from error


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
    target: pb.Target | None = None,
) -> Outcome:
    """Compiles a bundle anew: the salt is part of every cache key. An equal request gets the same operation."""
    options = {
        "model": model,
        "config_json": json.dumps(config),
        "optimization_level": level,
        "request_id": identity,
        "salt": number_of(identity),
        "target": target,
    }
    name = (await compiler.running.client.compile(**options)).name
    announce(name)
    outcome = await finish(compiler, name)
    assert (await compiler.running.client.compile(**options)).name == name
    return outcome


def write_models(home: Path) -> None:
    """Writes the checkpoints that actions compile."""
    write_checkpoint(home / "models" / "tiny")
    untokenized = write_checkpoint(home / "models" / "untokenized")
    (untokenized / "tokenizer.json").unlink()
    (untokenized / "tokenizer.model").write_bytes(train_sentencepiece("llama"))
    large = write_checkpoint(home / "models" / "large", **_LARGE)
    tensors = random_tensors(MODEL_CONFIG | _LARGE, 0)
    save_file({name: tensor * 0.05 for name, tensor in tensors.items()}, large / "model.safetensors")


async def convert(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    """Compiles a bundle whose tokenizer is converted, and loads that."""
    outcome = await build(_SMALL, pb.OPTIMIZATION_LEVEL_O0, compiler, identity, announce, model="untokenized")
    if outcome == Outcome():
        bundle = open_bundle(Layout(compiler.home / "store"), outcome.digest)
        assert bundle.manifest.tokenizer is not None
        tokenizer = tokenizers.Tokenizer.from_file(str(bundle.blob_path(bundle.manifest.tokenizer.digest)))
        text = "Once upon a time"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    return outcome


async def lower_for_neuron(
    compiler: RestartedCompiler, identity: str, announce: Callable[[str], None], *, leads_session: bool
) -> Outcome:
    """Compiles for trn2 with neuronx-cc's double, which waits until it is killed, and from then on makes NEFFs."""
    if identity.endswith("/1"):
        compiler.neuron.hold(leads_session=leads_session)
        compiler.before_restart = compiler.neuron.answer
    target = pb.Target(kind=pb.Target.KIND_TRN2)
    outcome = await build(NEURON_CONFIG, pb.OPTIMIZATION_LEVEL_O1, compiler, identity, announce, target=target)
    if outcome == Outcome():
        await compiler.neuron.check_bundle(outcome.digest)
    return outcome


def four_ranks(*, is_aside: bool) -> Action:
    """Compiles for four ranks; the weights are part of the bundle, or of a store of the build's own."""
    config = {"neuron_config": _FOUR | {"save_sharded_checkpoint": not is_aside}}
    return partial(build, config, pb.OPTIMIZATION_LEVEL_O0, model="large")


async def provide_base(compiler: RestartedCompiler) -> None:
    """Compiles the bundle whose executables `shard` takes."""
    operation = await compiler.running.client.compile(
        name="base", config_json=json.dumps(_SMALL), optimization_level=pb.OPTIMIZATION_LEVEL_O0
    )
    assert await finish(compiler, operation.name) == Outcome()
    compiler.has_base = True


async def provide_kept(compiler: RestartedCompiler) -> str:
    """Imports the bundle that every row has to leave as it is; its digest."""
    digest = publish_sample(Layout.create(compiler.home / "source"), version="kept")
    name, _, alias = KEPT_ALIAS.partition("@")
    await _import(compiler, name, digest, alias=alias)
    return digest


async def digest_of(compiler: RestartedCompiler, ref: str) -> str:
    response = await compiler.running.client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=ref))
    return str(response.bundle.digest)


async def discard(compiler: RestartedCompiler) -> None:
    """Deletes what builds have made, and the cache's executables, so that the next row writes every blob again."""
    bundles = compiler.running.client.bundles
    listed = await bundles.ListBundles(bundle_pb2.ListBundlesRequest(name="tiny"))
    for bundle in listed.bundles:
        await bundles.DeleteBundle(bundle_pb2.DeleteBundleRequest(ref=f"tiny:v{bundle.version}"))
    await bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest(max_cache_age=Duration()))


async def shard(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    request = pb.ShardWeightsRequest(
        name="tiny", model="tiny", executables_ref="base:v1", request_id=identity, skip_cache_lookup=True
    )
    operation = await compiler.running.client.compiler.ShardWeights(request)
    announce(operation.name)
    return await finish(compiler, operation.name)


async def quantize(compiler: RestartedCompiler, identity: str, announce: Callable[[str], None]) -> Outcome:
    """Writes a checkpoint; one that an earlier attempt has finished goes before."""
    output = f"small-{number_of(identity)}"
    shutil.rmtree(compiler.home / "models" / output, ignore_errors=True)
    request = pb.QuantizeWeightsRequest(model="tiny", output=output, request_id=identity)
    operation = await compiler.running.client.compiler.QuantizeWeights(request)
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
    "compile for four ranks": four_ranks(is_aside=False),
    "compile for four ranks, weights aside": four_ranks(is_aside=True),
    "lower for trn2": partial(lower_for_neuron, leads_session=False),
    "lower for trn2 in sessions": partial(lower_for_neuron, leads_session=True),
    "convert": convert,
    "shard": shard,
    "quantize": quantize,
    "plan": plan,
    "plan a URL": plan_url,
    "import": import_,
    "collect": collect,
    "delete": delete,
}
