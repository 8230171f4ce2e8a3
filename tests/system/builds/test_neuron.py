"""Compiles for trn2, with doubles of Neuron's packages in another interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.manifest import Manifest
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import list_referrers, read_referrer
from bundle.store.verification import BlobVerifier
from compiler_svc.builds.neuron_files import COMPANION_TYPES
from compiler_svc.lower.neuron.hlo import read_hlo
from compiler_svc.records import GOLDEN_TYPE
from tests.checkpoints.random_weights import write_checkpoint
from tests.neuron.standin import VERSIONS, make_interpreter
from tests.processes import descendants
from tests.servers.compiler_process import list_libraries, run_compiler
from tests.servers.running_compiler import Client, response_of
from tests.servers.stack import Stack

TRN2 = pb.Target(kind=pb.Target.KIND_TRN2)
CONFIG = {
    "seq_len": 32,
    "batch_size": 2,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
    "enable_bucketing": True,
    "context_encoding_buckets": [8],
    "token_generation_buckets": [32],
    "cc_pipeline_tiling_factor": 4,
    "scratchpad_page_size": 512,
}
#: Two ranks, which return tokens only.
GREEDY_PAIR = {"tp_degree": 2, "on_device_sampling_config": {}}
#: What changes the description of the model, besides.
CHANGED_PAIR = GREEDY_PAIR | {"fused_qkv": True, "vocab_parallel": True}
TAGS = ["context_encoding_8", "token_generation_32"]


TINY: dict[str, Any] = {"neuron_config": CONFIG, "target": TRN2}


async def test_a_checkpoint_becomes_a_bundle_of_neffs(client: Client, stack: Stack, layout: Layout) -> None:
    fields = TINY | {"model": str(write_checkpoint(stack.new_model("tiny")))}
    result = await client.build(**fields, name="neffs")
    assert [one.tag for one in result.executables] == TAGS
    assert {one.cache for one in result.executables} == {pb.CACHE_RESULT_MISS}
    assert any("are not compared with the reference" in warning for warning in result.warnings)
    assert await read_golden_check(client, result.digest) == bundle_pb2.GOLDEN_CHECK_NONE
    check_bundle(layout, result.digest)

    # NEFFs hold a random number: the cache is what makes equal compiles equal.
    again = await client.build(**fields, name="other")
    assert (again.cache, again.digest) == (pb.CACHE_RESULT_HIT, result.digest)
    changed = CONFIG | {"cc_pipeline_tiling_factor": 8}
    flags = await client.build(**fields | {"neuron_config": changed}, name="neffs")
    assert {one.tag for one in flags.executables if one.cache == pb.CACHE_RESULT_MISS} == {"context_encoding_8"}

    planned = await client.plan(**fields)
    assert {one.cache for one in planned.executables} == {pb.CACHE_RESULT_HIT}
    unserved = await client.plan(**fields | {"neuron_config": CONFIG | {"k_cache_transposed": True}})
    assert any("k_cache_transposed: a compile refuses it" in warning for warning in unserved.warnings)
    (compiler,) = (one for one in descendants(stack.process.pid) if "compiler_svc" in one.cmdline())
    assert {name for name in list_libraries(compiler.pid) if "torch" in name} == set()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [GREEDY_PAIR, CHANGED_PAIR], ids=["pair", "changed-pair"])
async def test_xla_computes_what_is_compared_without_a_core(
    home: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    write_checkpoint(home / "models" / "tuned", seed=1)
    interpreter = make_interpreter(tmp_path, has_xla=True)
    async with run_compiler(home, "--neuron-python", str(interpreter)) as compiler:
        client = compiler.client
        compiled = await client.build(neuron_config=CONFIG | changes, target=TRN2)
        tuned = pb.ShardWeightsRequest(name="tuned", model="tuned", executables_ref="tiny")
        sharded = response_of(await client.finish(await client.compiler.ShardWeights(tuned)))
        for result in (compiled, sharded):
            assert await read_golden_check(client, result.digest) == bundle_pb2.GOLDEN_CHECK_XLA_CPU
            assert any("XLA on the CPU computed" in warning for warning in result.warnings)
            check_golden_record(home, result.digest)
    check_weights_alone(home, compiled.digest, sharded.digest)


def check_golden_record(home: Path, digest: str) -> None:
    layout = Layout(home / "store")
    (referrer,) = list_referrers(layout, digest, GOLDEN_TYPE)
    record = json.loads(read_referrer(layout, referrer.digest))
    assert record["method"] == "xla_cpu"
    assert {one["tag"]: one["num_steps"] > 0 for one in record["executables"]} == dict.fromkeys(TAGS, True)
    assert 0 < record["max_deviation"] < 1e-5, "logits, also of bundles that return tokens"


def check_weights_alone(home: Path, full_digest: str, weights_digest: str) -> None:
    full, weights = (open_bundle(Layout(home / "store"), one) for one in (full_digest, weights_digest))
    weights.verify(BlobVerifier(None))
    assert weights.manifest.executables == ()
    for same in ("graph_abi_digest", "target", "tp_degree", "state"):
        assert getattr(weights.manifest, same) == getattr(full.manifest, same)
    (own,), (others,) = weights.manifest.weight_sets, full.manifest.weight_sets
    assert len(own.shards) == 2
    assert [shard.tensors for shard in own.shards] == [shard.tensors for shard in others.shards]
    assert {shard.blob for shard in own.shards}.isdisjoint(shard.blob for shard in others.shards)


async def read_golden_check(client: Client, digest: str) -> bundle_pb2.GoldenCheck:
    found = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=digest))
    return found.bundle.golden_check


def check_bundle(layout: Layout, digest: str) -> None:
    bundle = open_bundle(layout, digest)
    bundle.verify(BlobVerifier(None))
    manifest = bundle.manifest
    assert (manifest.target.kind, manifest.target.architecture, manifest.target.lnc) == ("trn2", "cayman", 2)
    assert {name: manifest.toolchain[f"neuron.{name}"] for name in VERSIONS} == VERSIONS
    assert manifest.has_weights
    check_flags(manifest)
    titles = {layer.title for layer in bundle.image.layers}
    assert {f"executables/{tag}.neff" for tag in TAGS} <= titles
    for kind in COMPANION_TYPES.values():
        assert len(list_referrers(layout, digest, kind)) == len(TAGS)
    for one in list_referrers(layout, digest, COMPANION_TYPES["hlo"]):
        assert read_hlo(read_referrer(layout, one.digest)).entry.parameters


def check_flags(manifest: Manifest) -> None:
    factors = {"context_encoding": 4, "token_generation": 1}
    levels = {"context_encoding": "-O1", "token_generation": "-O2"}
    for executable in manifest.executables:
        assert (executable.format, executable.state_convention) == ("neff", "aliased")
        assert executable.neff is not None
        flags = executable.neff.compiler_flags
        assert {"--target=trn2", "--lnc=2", "--hbm-scratchpad-page-size=512", levels[executable.submodel]} <= {*flags}
        assert f"--cc-pipeline-tiling-factor={factors[executable.submodel]}" in " ".join(flags)
        assert [one.name for one in executable.constants] == [one.tensor for one in executable.constants]


@pytest.mark.slow
async def test_what_neuronx_cc_says_reaches_the_caller(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = tmp_path / "neuronx_cc.json"
    orders.write_text(json.dumps({"error": "exit code 70", "log": "[NCC_EVRF007] too many instructions"}))
    monkeypatch.setenv("NEURON_TEST_NEURONX_CC", str(orders))
    async with run_compiler(home, "--neuron-python", str(make_interpreter(tmp_path))) as compiler:
        failed = await compiler.client.fail(await compiler.client.compile(**TINY), "INTERNAL", "NEURON_COMPILER_FAILED")
        assert failed.metadata["codes"] == "NCC_EVRF007"
        assert failed.metadata["tag"] in TAGS
        assert "[NCC_EVRF007] too many instructions" in failed.message
