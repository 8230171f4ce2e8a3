"""Models as bundles describe them, without their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from gguf import GGMLQuantizationType as Kind

from bundle.errors import BlobCorrupt
from bundle.manifest import Manifest
from bundle.store.layout import Layout
from bundle.store.oci import IMAGE_MANIFEST_TYPE, MANIFEST_TYPE, TITLE, BlobDescriptor, ImageManifest
from bundle.store.reader import Bundle
from compiler_svc.builds.build import Build
from compiler_svc.builds.manifest_stage import resolved_config
from compiler_svc.config import InferenceConfig, resolve_config
from compiler_svc.errors import GraphAbiMismatch
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.planning.bundled_model import describe_bundled_model
from compiler_svc.planning.model_overrides import override_model
from compiler_svc.trace.submodels import describe_state
from compiler_svc.weights.checkpoint import Checkpoint
from tests.bundles.manifests import DIGEST, make_manifest
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.nested_models import NESTED, write_nested_model
from tests.checkpoints.random_weights import write_checkpoint
from tests.checkpoints.tiny_models import write_tiny_model

LORA: dict[str, Any] = {"lora_config": {"max_loras": 2, "max_lora_rank": 4}}

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def plan(checkpoint: Checkpoint, document: Mapping[str, Any]) -> tuple[BuildPlan, InferenceConfig]:
    config = resolve_config(dict(document), checkpoint_dtype="float32").config
    return plan_build(override_model(checkpoint, config), config.neuron_config, target="cpu"), config


def describe(planned: BuildPlan, config: InferenceConfig) -> Manifest:
    """What of a manifest counts here."""
    build = cast("Build", SimpleNamespace(spec=SimpleNamespace(config=config), plan=planned))
    manifest = make_manifest(tp_degree=planned.model.tp_degree)
    return msgspec.structs.replace(manifest, config=resolved_config(build), state=describe_state(planned.model))


def open_bundle(path: Path, manifest: Manifest, files: Mapping[str, bytes]) -> Bundle:
    layout = Layout.create(path)
    blobs = {title: layout.put_blob(data) for title, data in files.items()}
    layers = (
        BlobDescriptor(
            media_type="application/json",
            digest=blob.digest,
            size_bytes=blob.size_bytes,
            annotations={TITLE: title},
        )
        for title, blob in blobs.items()
    )
    image = ImageManifest(
        schema_version=2,
        media_type=IMAGE_MANIFEST_TYPE,
        config=BlobDescriptor(media_type=MANIFEST_TYPE, digest=DIGEST, size_bytes=1),
        layers=tuple(layers),
    )
    return Bundle(layout, image.config, image, manifest, manifest.to_json())


def check(path: Path, checkpoint: Checkpoint, document: Mapping[str, Any]) -> None:
    """Checks that a bundle describes the model that its build had planned."""
    planned, config = plan(checkpoint, document)
    files = {"config.json": json.dumps(checkpoint.whole_config).encode()}
    found = describe_bundled_model(open_bundle(path / "store", describe(planned, config), files))
    assert found.description == planned.model.description
    assert found.description.adapter_parameters()
    assert found.config == config.neuron_config


@pytest.mark.parametrize(
    "document",
    [
        {"neuron_config": LORA},
        {"neuron_config": LORA | {"tp_degree": 2, "fused_qkv": True, "quantized": True, "vocab_parallel": True}},
        {"neuron_config": LORA | {"kv_cache_quant": True, "cast_type": "as-declared", "attention_dtype": "bfloat16"}},
        {"neuron_config": LORA, "rms_norm_eps": 0.25, "rope_theta": 500.0},
        {"neuron_config": LORA, "attribute_map": {"rms_norm_eps": "norm_epsilon"}, "norm_epsilon": 0.125},
    ],
    ids=["plain", "changed", "dtypes", "attributes", "names"],
)
def test_the_model_is_that_of_the_build(tmp_path: Path, document: dict[str, Any]) -> None:
    check(tmp_path, Checkpoint.open(write_checkpoint(tmp_path / "model")), document)


def test_models_inside_of_others_and_of_gguf_files(tmp_path: Path) -> None:
    nested = write_nested_model(tmp_path / "nested", next(iter(NESTED)))
    check(tmp_path / "of nested", nested.checkpoint, {"neuron_config": LORA})
    write_tiny_model(tmp_path / "model", SMALL)
    write_gguf(tmp_path / "model", tmp_path / "model.gguf", Kind.F16)
    check(tmp_path / "of gguf", Checkpoint.open(tmp_path / "model.gguf"), {"neuron_config": LORA})


def test_what_a_bundle_does_not_say_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    manifest = describe(*plan(checkpoint, {"neuron_config": LORA}))
    with pytest.raises(GraphAbiMismatch, match=r"config\.json"):
        describe_bundled_model(open_bundle(tmp_path / "empty", manifest, {"README.md": b"{}"}))

    config = json.dumps(checkpoint.whole_config).encode()
    bundle = open_bundle(tmp_path / "store", manifest, {"config.json": config})
    state = msgspec.structs.replace(manifest.state, kv_heads_by_rank=((1, 0),))
    others = msgspec.structs.replace(manifest, state=state)
    with pytest.raises(GraphAbiMismatch, match="kv_heads_by_rank"):
        describe_bundled_model(open_bundle(tmp_path / "others", others, {"config.json": config}))

    path = bundle.blob_path(bundle.image.layers[0].digest)
    path.chmod(0o644)
    path.write_bytes(config.replace(b"1", b"2"))
    with pytest.raises(BlobCorrupt, match=r"config\.json"):
        describe_bundled_model(bundle)
