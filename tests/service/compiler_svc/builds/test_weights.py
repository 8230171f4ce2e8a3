"""Bundles of executables alone and of weights alone, by real builds at optimization level 0."""

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.manifest import Tokenizer
from bundle.store.layout import Layout
from bundle.store.oci import TOKENIZER_TYPE
from bundle.store.reader import Bundle, open_bundle
from bundle.store.referrers import list_referrers, read_referrer
from bundle.store.verification import BlobVerifier
from compiler_svc.builds.build_record import BUILD_TYPE
from compiler_svc.records import GOLDEN_TYPE
from tests.checkpoints.random_weights import write_checkpoint
from tests.checkpoints.tokenizer_files import byte_level
from tests.checkpoints.tokenizer_sources import train_sentencepiece, write_byte_level
from tests.servers.compiler_process import run_compiler
from tests.servers.refusals import refusal, refused
from tests.servers.running_compiler import Client, response_of

CONFIG = {"seq_len": 16, "max_context_length": 8, "on_device_sampling_config": {"dynamic": True}}


@pytest.fixture
async def client(home: Path) -> AsyncIterator[Client]:
    async with run_compiler(home) as compiler:
        yield compiler.client


async def compile_tiny(client: Client, name: str, **changes: Any) -> pb.CompileResponse:
    level = pb.OPTIMIZATION_LEVEL_O0
    return await client.build(name=name, neuron_config=CONFIG | changes, optimization_level=level)


async def shard(client: Client, **fields: Any) -> Any:
    defaults = {"name": "tuned", "model": "tuned", "executables_ref": "tiny"}
    return await client.compiler.ShardWeights(pb.ShardWeightsRequest(**(defaults | fields)))


@pytest.mark.slow
async def test_executables_and_weights_apart(client: Client, home: Path) -> None:
    tuned = write_checkpoint(home / "models" / "tuned", seed=1)
    (tuned / "README.md").write_text("---\nlicense: mit\nbase_model: tiny\n---\n")
    (tuned / "LICENSE").write_text("Do as you like.")
    (home / "models" / "tiny" / "README.md").write_text("---\nlicense: [\n---\n")
    first = await compile_tiny(client, "tiny")
    assert [warning.partition(",")[0] for warning in first.warnings] == ["model: the bundle names no licence"]
    full = open_verified(home, first.digest)
    assert "org.opencontainers.image.licenses" not in (full.image.annotations or {})

    await check_executables_alone(client, home, full)

    operation = await shard(client, executables_ref="bare")
    events = await client.watch(operation.name)
    stages = list(dict.fromkeys(event.progress.stage for event in events[:-1]))
    assert stages[-3:] == [pb.COMPILE_STAGE_SHARD, pb.COMPILE_STAGE_VERIFY, pb.COMPILE_STAGE_PUBLISH]
    response = response_of(await client.get(operation.name))
    assert (response.version, response.cache, list(response.executables)) == (1, pb.CACHE_RESULT_MISS, [])
    weights = open_verified(home, response.digest)
    await check_weights_alone(client, full, weights)

    again = response_of(await client.finish(await shard(client, name="other", executables_ref="bare")))
    assert (again.digest, again.cache) == (response.digest, pb.CACHE_RESULT_HIT)

    await check_refusals(client, home)
    await check_other_tokenizer(client, home, again)


async def check_executables_alone(client: Client, home: Path, full: Bundle) -> None:
    response = await compile_tiny(client, "bare", save_sharded_checkpoint=False)
    bare = open_verified(home, response.digest)
    assert response.cache == pb.CACHE_RESULT_HIT
    assert len(response.warnings) == 1, "of the model card"
    assert describes_no_weights(bare)
    assert bare.manifest.graph_abi_digest == full.manifest.graph_abi_digest
    assert read_record(bare, GOLDEN_TYPE) == read_record(full, GOLDEN_TYPE)

    response = await compile_tiny(client, "unchecked", skip_sharding=True)
    unchecked = open_verified(home, response.digest)
    assert [warning.partition(":")[0] for warning in response.warnings] == ["neuron_config.skip_sharding", "model"]
    assert describes_no_weights(unchecked)
    assert unchecked.manifest.graph_abi_digest == full.manifest.graph_abi_digest
    assert list_referrers(unchecked.layout, unchecked.digest, GOLDEN_TYPE) == ()


async def check_weights_alone(client: Client, full: Bundle, weights: Bundle) -> None:
    manifest = weights.manifest
    assert manifest.executables == ()
    assert manifest.graph_abi_digest == full.manifest.graph_abi_digest
    assert manifest.checkpoint_digest != full.manifest.checkpoint_digest
    for same in ("config", "target", "state", "limits", "sampling", "tokenizer", "tp_degree"):
        assert getattr(manifest, same) == getattr(full.manifest, same)
    (own,), (others,) = manifest.weight_sets, full.manifest.weight_sets
    assert [shard.tensors for shard in own.shards] == [shard.tensors for shard in others.shards]
    assert [shard.blob for shard in own.shards] != [shard.blob for shard in others.shards]
    assert {layer.title for layer in weights.image.layers} == {
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "neuron_config.json",
        "tokenizer.json",
        "weights/tp0_sharded_checkpoint.safetensors",
    }
    annotations = weights.image.annotations or {}
    assert annotations["org.opencontainers.image.licenses"] == "MIT"
    assert annotations["org.opencontainers.image.base.name"] == "tiny"
    assert json.loads(annotations["dev.kiln.toolchain"]) == manifest.toolchain
    described = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref="tuned"))
    assert described.bundle.contents == bundle_pb2.BUNDLE_CONTENTS_WEIGHTS
    golden = read_record(weights, GOLDEN_TYPE)
    assert golden["reference"].startswith("transformers ")
    assert {one["tag"] for one in golden["executables"]} == {"context_encoding_8", "token_generation_16"}
    assert [one["num_prompt_tokens"] for one in golden["sequences"]] == [4, 8]
    assert read_record(weights, BUILD_TYPE)["stages_s"]["verify"] > 0


async def check_refusals(client: Client, home: Path) -> None:
    write_checkpoint(home / "models" / "hotter", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    how = await refused(shard(client, model="hotter"), "FAILED_PRECONDITION", "GRAPH_ABI_MISMATCH")
    assert how.metadata["attribute"].startswith("rope.")
    assert (how.metadata["actual"], how.metadata["expected"]) == ("5000", "10000")

    write_checkpoint(home / "models" / "nudged", rms_norm_eps=1e-6)
    assert (await refusal(shard(client, model="nudged"))).metadata["attribute"] == "rms_norm_eps"

    await refused(shard(client, executables_ref="tuned"), "FAILED_PRECONDITION", "EXECUTABLES_MISSING")
    for fields, reason in (
        ({"executables_ref": "nothing"}, "BUNDLE_NOT_FOUND"),
        ({"executables_ref": "Tiny?"}, "REF_INVALID"),
        ({"name": "Tiny"}, "NAME_INVALID"),
        ({"model": "../elsewhere"}, "PATH_OUTSIDE_MODEL_ROOTS"),
        ({"model": "missing"}, "CHECKPOINT_NOT_FOUND"),
        ({"request_id": "r" * 129}, "CONFIG_INVALID"),
    ):
        assert (await refusal(shard(client, **fields))).reason == reason

    operation = await shard(client, executables_ref="bare", request_id="r")
    assert (await shard(client, executables_ref="bare", request_id="r")).name == operation.name
    assert (await refusal(shard(client, request_id="r", name="other"))).reason == "REQUEST_ID_REUSED"


async def check_other_tokenizer(client: Client, home: Path, same: pb.CompileResponse) -> None:
    assert not any("LoadWeights compares" in warning for warning in same.warnings)
    byte_level().save(str(home / "models/tuned/tokenizer.json"))
    response = response_of(await client.finish(await shard(client, name="retold", executables_ref="bare")))
    assert any(warning.startswith("model: tokenizer.json differs") for warning in response.warnings)


def write_untokenized(home: Path, name: str, seed: int) -> Path:
    """A checkpoint without a tokenizer, but for what says how to read one."""
    path = write_checkpoint(home / "models" / name, seed=seed)
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "seed": seed}))
    return path


@pytest.mark.slow
async def test_weights_get_the_tokenizer_that_transformers_makes(client: Client, home: Path) -> None:
    write_checkpoint(home / "models/tuned", seed=1)
    words = tokenizers.models.WordLevel({word: place for place, word in enumerate(("a", "<s>", "</s>"))}, unk_token="a")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|im_end|>"}
    for name in ("tiny", "tuned"):
        path = home / "models" / name
        tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        (path / "special_tokens_map.json").write_text(json.dumps(tokens))
    response = await compile_tiny(client, "tiny")
    made = open_verified(home, response.digest)
    assert made.manifest.tokenizer is not None
    assert any("; with the checkpoint's, " in warning for warning in response.warnings)
    files = {file.title: made.blob_path(file.blob) for file in made.manifest.tokenizer.files}
    assert json.loads(files["tokenizer_config.json"].read_text())["bos_token"] == "<s>"
    assert "<|im_end|>" in files["tokenizer.json"].read_text()

    tuned, warnings = await shard_tokenizer(client, home, "tuned")
    assert tuned == made.manifest.tokenizer
    assert not any("LoadWeights compares" in warning for warning in warnings)


@pytest.mark.slow
async def test_weights_whose_tokenizer_is_converted(client: Client, home: Path) -> None:
    shutil.rmtree(home / "models" / "tiny")
    for seed, name in enumerate(("tiny", "tuned")):
        path = write_untokenized(home, name, seed)
        (path / "tokenizer.model").write_bytes(train_sentencepiece("llama"))
    full = open_verified(home, (await compile_tiny(client, "tiny")).digest)
    converted = full.manifest.tokenizer
    assert converted is not None
    assert [file.title for file in converted.files] == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]

    tuned, warnings = await shard_tokenizer(client, home, "tuned")
    assert tuned.digest == converted.digest
    assert not any("LoadWeights compares" in warning for warning in warnings)

    write_byte_level(write_untokenized(home, "merged", 2), "<|endoftext|>")
    (home / "models/merged/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    merged, warnings = await shard_tokenizer(client, home, "merged")
    assert [file.title for file in merged.files] == [
        "merges.txt",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    ]
    assert merged.digest != converted.digest
    assert any("tokenizer.json differs from that of the executables' bundle" in warning for warning in warnings)

    path = write_untokenized(home, "lone", 3)
    (path / "vocab.json").write_text("{}")
    lone, warnings = await shard_tokenizer(client, home, "lone")
    assert lone == converted
    (warning,) = (warning for warning in warnings if "and no tokenizer.json" in warning)
    assert warning.endswith("so the weights take the tokenizer of the executables' bundle")

    (path / "tokenizer.model").write_bytes(b"no model")
    operation = await client.finish(await shard(client, name="broken", model="lone"))
    assert "tokenizer.model: got no sentencepiece model" in operation.error.message


async def shard_tokenizer(client: Client, home: Path, model: str) -> tuple[Tokenizer, Sequence[str]]:
    """Makes weights of a model; returns the tokenizer of their bundle, which has its files and no others; warnings."""
    response = response_of(await client.finish(await shard(client, name=model, model=model)))
    bundle = open_verified(home, response.digest)
    tokenizer = bundle.manifest.tokenizer
    assert tokenizer is not None
    assert {layer.title for layer in bundle.image.layers if layer.media_type == TOKENIZER_TYPE} == {
        file.title for file in tokenizer.files
    }
    return tokenizer, response.warnings


def open_verified(home: Path, digest: str) -> Bundle:
    bundle = open_bundle(Layout(home / "store"), digest)
    bundle.verify(BlobVerifier(None))
    return bundle


def read_record(bundle: Bundle, kind: str) -> Any:
    (referrer,) = list_referrers(bundle.layout, bundle.digest, kind)
    return json.loads(read_referrer(bundle.layout, referrer.digest))


def describes_no_weights(bundle: Bundle) -> bool:
    shards = [shard for weight_set in bundle.manifest.weight_sets for shard in weight_set.shards]
    return all(shard.blob is None and shard.size_bytes == 0 and shard.tensors for shard in shards)
