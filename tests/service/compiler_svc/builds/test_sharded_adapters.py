"""Bundles of adapters, by real builds at optimization level 0 that write no weights."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bundle.manifest import BundledAdapter
from bundle.store.layout import Layout
from bundle.store.reader import Bundle, open_bundle
from bundle.store.verification import BlobVerifier
from compiler_svc.builds.build_record import BUILD_TYPE
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.adapters import WrittenAdapter, fit, load_ranks, make_adapter, with_room
from tests.checkpoints.tiny_models import TinyModel
from tests.servers.compiler_process import run_compiler
from tests.servers.refusals import expect, read_refusal, refusal, refused
from tests.servers.running_compiler import Client, DirectedRunner, response_of

#: Without weights there is no golden check, so a compile takes a second or two.
CONFIG: dict[str, Any] = {"seq_len": 16, "max_context_length": 8, "tp_degree": 2, "skip_sharding": True}
LORA = {"max_loras": 2, "max_lora_rank": 8}


@pytest.fixture
async def client(home: Path) -> AsyncIterator[Client]:
    async with run_compiler(home, f"--model-url=file://{home}/remote") as compiler:
        yield compiler.client


@pytest.fixture
def tiny(home: Path) -> TinyModel:
    path = home / "models" / "tiny"
    return TinyModel(AutoModelForCausalLM.from_pretrained(path), Checkpoint.open(path))


def write_adapter(tiny: TinyModel, home: Path, name: str = "pirate", **options: Any) -> WrittenAdapter:
    path = home / "models" / name
    make_adapter(tiny, path, **options)
    return WrittenAdapter(path)


async def compile_with_room(client: Client, name: str = "tiny", **changes: Any) -> pb.CompileResponse:
    config = CONFIG | {"lora_config": LORA} | changes
    return await client.build(name=name, neuron_config=config, optimization_level=pb.OPTIMIZATION_LEVEL_O0)


async def shard(client: Client, **fields: Any) -> Any:
    defaults = {"name": "pirate", "adapter": "pirate", "executables_ref": "tiny"}
    return await client.compiler.ShardAdapter(pb.ShardAdapterRequest(**(defaults | fields)))


def open_verified(home: Path, digest: str) -> Bundle:
    bundle = open_bundle(Layout(home / "store"), digest)
    bundle.verify(BlobVerifier(None))
    return bundle


def load_files(bundle: Bundle, adapter: BundledAdapter) -> list[dict[str, torch.Tensor]]:
    return [load_file(bundle.blob_path(str(shard.blob))) for shard in adapter.shards]


def check_files(bundle: Bundle, adapter: BundledAdapter, path: Path, tiny: TinyModel) -> None:
    """Checks the files of an adapter, and its digest, against those of a description of the model."""
    fitted = fit(path, with_room(tiny.checkpoint.description, rank=LORA["max_lora_rank"]), tp_degree=2)
    assert adapter.digest == fitted.digest
    for written, wanted in zip(load_files(bundle, adapter), load_ranks(fitted), strict=True):
        assert written.keys() == wanted.keys()
        assert all(torch.equal(written[name], wanted[name]) for name in wanted)


async def test_an_adapter_becomes_a_bundle(client: Client, home: Path, tiny: TinyModel) -> None:
    base = open_verified(home, (await compile_with_room(client)).digest)
    written = write_adapter(tiny, home)
    operation = await shard(client)
    stages = {event.progress.stage for event in (await client.watch(operation.name))[:-1]}
    assert pb.COMPILE_STAGE_PUBLISH in stages
    assert pb.COMPILE_STAGE_LOWER not in stages
    response = response_of(await client.get(operation.name))
    assert (response.name, response.version, response.cache) == ("pirate", 1, pb.CACHE_RESULT_MISS)

    bundle = open_verified(home, response.digest)
    (adapter,) = bundle.manifest.adapters
    assert adapter.name == "pirate"
    check_files(bundle, adapter, written.path, tiny)
    check_manifest(bundle, base)
    described = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref="pirate"))
    assert described.bundle.contents == bundle_pb2.BUNDLE_CONTENTS_ADAPTER
    assert [one.media_type for one in described.bundle.referrers] == [BUILD_TYPE]
    collected = await client.bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest())
    assert collected.deleted_blob_count == 0

    await check_equal_adapters(client, home, written, tiny, response.digest)
    await check_refusals(client, home, written)


def check_manifest(bundle: Bundle, base: Bundle) -> None:
    manifest = bundle.manifest
    assert (manifest.executables, manifest.weight_sets, manifest.tokenizer) == ((), (), None)
    assert manifest.checkpoint_digest == manifest.adapters[0].digest
    for same in ("config", "target", "state", "limits", "serving", "tokens", "tp_degree", "graph_abi_digest"):
        assert getattr(manifest, same) == getattr(base.manifest, same)
    titles = [f"adapters/pirate.tp{rank}.safetensors" for rank in range(2)]
    assert sorted(layer.title for layer in bundle.image.layers) == [*titles, "manifest.json"]


async def check_equal_adapters(
    client: Client, home: Path, written: WrittenAdapter, tiny: TinyModel, digest: str
) -> None:
    again = response_of(await client.finish(await shard(client)))
    assert (again.digest, again.version, again.cache) == (digest, 1, pb.CACHE_RESULT_HIT)
    # The same numbers in other files.
    write_adapter(tiny, home, "pickled", is_pickled=True)
    config = json.loads((written.path / "adapter_config.json").read_text())
    (home / "models" / "pickled" / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.5}))
    pickled = response_of(await client.finish(await shard(client, adapter="pickled")))
    assert (pickled.digest, pickled.cache) == (digest, pb.CACHE_RESULT_MISS)
    state = {name.removeprefix("base_model.model."): one for name, one in load_file(written.weights).items()}
    nxd = {"lora_rank": config["r"], "lora_alpha": config["lora_alpha"], "target_modules": {"q_proj"}}
    torch.save(state | {"lora_config": nxd}, home / "models" / "pirate.pt")
    assert response_of(await client.finish(await shard(client, adapter="pirate.pt"))).digest == digest
    written.copy(home / "remote" / "pirate")
    fetched = response_of(await client.finish(await shard(client, adapter=f"file://{home}/remote/pirate")))
    assert fetched.digest == digest
    write_adapter(tiny, home, "other", seed=1)
    other = response_of(await client.finish(await shard(client, adapter=str(home / "models" / "other"))))
    assert other.digest != digest
    assert open_verified(home, other.digest).manifest.graph_abi_digest


async def check_refusals(client: Client, home: Path, written: WrittenAdapter) -> None:
    before = await client.bundles.ListBundles(bundle_pb2.ListBundlesRequest())
    for fields, code, reason in (
        ({"executables_ref": "nothing"}, "NOT_FOUND", "BUNDLE_NOT_FOUND"),
        ({"executables_ref": "pirate"}, "FAILED_PRECONDITION", "EXECUTABLES_MISSING"),
        ({"name": "Pirate"}, "INVALID_ARGUMENT", "NAME_INVALID"),
        ({"adapter": "tiny"}, "NOT_FOUND", "ADAPTER_NOT_FOUND"),
        ({"request_id": "r" * 129}, "INVALID_ARGUMENT", "CONFIG_INVALID"),
    ):
        await refused(shard(client, **fields), code, reason)
    # Errors of paths name the model roots.
    expect(await refusal(shard(client, adapter="missing")), "NOT_FOUND", "ADAPTER_NOT_FOUND")
    expect(await refusal(shard(client, adapter="../elsewhere")), "PERMISSION_DENIED", "PATH_OUTSIDE_MODEL_ROOTS")
    dora = written.copy(home / "models" / "dora")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    how = await refused(shard(client, adapter="dora"), "INVALID_ARGUMENT", "ADAPTER_INVALID")
    assert [*how.fields] == ["use_dora"]

    for number, (edit, field) in enumerate(
        (
            (lambda state: next(iter(state.values())).fill_(torch.nan), "lora_A.weight"),
            (lambda state: state.update({name: one[:, :-1].clone() for name, one in state.items()}), "lora_A.weight"),
            (
                lambda state: state.update({f"base_model.model.x.{one}.weight": torch.ones(4, 4) for one in KINDS}),
                "x",
            ),
        )
    ):
        written.copy(home / "models" / f"broken{number}", edit)
        operation = await client.finish(await shard(client, adapter=f"broken{number}"))
        how = expect(read_refusal(operation.error), "INVALID_ARGUMENT", "ADAPTER_INVALID")
        assert any(name.endswith(field) for name in how.fields)
    after = await client.bundles.ListBundles(bundle_pb2.ListBundlesRequest())
    assert after == before


KINDS = ("lora_A", "lora_B")


async def test_executables_without_room_take_none(
    served: tuple[Client, DirectedRunner], home: Path, tiny: TinyModel
) -> None:
    client, runner = served
    runner.is_open.set()
    await client.build()
    write_adapter(tiny, home)
    await refused(shard(client), "FAILED_PRECONDITION", "ADAPTERS_UNSUPPORTED", "executables_ref")


async def test_listed_adapters_come_with_the_bundle(client: Client, home: Path, tiny: TinyModel) -> None:
    one = write_adapter(tiny, home, "one")
    two = write_adapter(tiny, home, "two", seed=1)
    empty = open_verified(home, (await compile_with_room(client)).digest)
    lora = LORA | {"lora_ckpt_paths": {"owner/two": "two"}, "lora_ckpt_paths_cpu": {"one": "one"}}
    bundle = open_verified(home, (await compile_with_room(client, lora_config=lora)).digest)
    assert [adapter.name for adapter in bundle.manifest.adapters] == ["one", "owner/two"]
    for adapter, path in zip(bundle.manifest.adapters, (one.path, two.path), strict=True):
        check_files(bundle, adapter, path, tiny)
    assert bundle.manifest.graph_abi_digest == empty.manifest.graph_abi_digest
    assert bundle.manifest.executables == empty.manifest.executables

    # Other numbers below the same path.
    write_adapter(tiny, home, "three", seed=2)
    WrittenAdapter(home / "models" / "three").weights.rename(one.weights)
    changed = open_verified(home, (await compile_with_room(client, lora_config=lora)).digest)
    adapters = zip(changed.manifest.adapters, bundle.manifest.adapters, strict=True)
    assert [new == old for new, old in adapters] == [False, True]

    one.weights.write_bytes(b"{}")
    operation = await client.finish(
        await client.compile(neuron_config=CONFIG | {"lora_config": lora}, optimization_level=pb.OPTIMIZATION_LEVEL_O0)
    )
    how = expect(read_refusal(operation.error), "INVALID_ARGUMENT", "ADAPTER_INVALID")
    assert "adapter one " in how.message


@pytest.mark.slow
async def test_a_killed_compiler_goes_on(home: Path, tiny: TinyModel) -> None:
    write_adapter(tiny, home)
    async with run_compiler(home) as compiler:
        await compile_with_room(compiler.client)
        operation = await shard(compiler.client)
        compiler.process.kill()
        await compiler.process.wait()
    async with run_compiler(home) as compiler:
        response = response_of(await compiler.client.finish(operation))
        again = response_of(await compiler.client.finish(await shard(compiler.client)))
    (adapter,) = open_verified(home, response.digest).manifest.adapters
    assert adapter.name == "pirate"
    assert (again.digest, again.cache) == (response.digest, pb.CACHE_RESULT_HIT)


@pytest.mark.slow
async def test_weights_for_executables_with_adapters_have_none(client: Client, home: Path, tiny: TinyModel) -> None:
    """The adapters stay with the executables, whatever weights these run with."""
    write_adapter(tiny, home)
    await compile_with_room(client, lora_config=LORA | {"lora_ckpt_paths": {"pirate": "pirate"}})
    request = pb.ShardWeightsRequest(name="weights", model="tiny", executables_ref="tiny")
    response = response_of(await client.finish(await client.compiler.ShardWeights(request)))
    weights = open_verified(home, response.digest)
    assert weights.manifest.has_weights
    assert weights.manifest.adapters == ()
    assert not any(layer.title.startswith("adapters/") for layer in weights.image.layers)
