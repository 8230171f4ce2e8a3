"""The configuration that a bundle was compiled with."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bundle.abi.digest import compute_graph_abi_digest
from bundle.manifest import WeightSet
from compiler_svc.config import resolve_config
from compiler_svc.errors import GraphAbiMismatch
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.planning.weights_fit import check_weights_fit, read_config
from compiler_svc.trace.submodels import describe_state
from tests.bundles.manifests import make_manifest
from tests.bundles.samples import sample_manifest
from tests.checkpoints.tiny_models import write_tiny_model


def test_attributes_that_are_newer_than_a_bundle_have_their_defaults() -> None:
    manifest = sample_manifest()
    expected = resolve_config(
        {"neuron_config": {"seq_len": 16, "tp_degree": 2, "torch_dtype": "bfloat16"}}, checkpoint_dtype=None
    )
    assert "pa_num_blocks" not in manifest.config["neuron_config"]
    assert read_config(manifest) == expected.config


def test_what_is_written_is_read() -> None:
    config = resolve_config({"neuron_config": {"batch_size": 3, "seq_len": 64}}, checkpoint_dtype="float32").config
    manifest = msgspec.structs.replace(sample_manifest(), config={"hidden_size": 8} | config.to_json())
    assert read_config(manifest) == config


def test_what_is_newer_than_bundles_changes_no_digest_while_it_is_unset() -> None:
    unset, given = (
        resolve_config({"neuron_config": one}, checkpoint_dtype="float32").config
        for one in ({}, {"kv_quant_config": {}})
    )
    assert "kv_quant_config" not in unset.to_json()["neuron_config"]
    assert given.to_json()["neuron_config"]["kv_quant_config"]["direct_cast"] is True
    manifest = msgspec.structs.replace(sample_manifest(), config={"hidden_size": 8} | given.to_json())
    assert read_config(manifest) == given


@pytest.mark.parametrize("neuron_config", [{"later_attribute": 1}, {"flash_decoding_enabled": True}, {"seq_len": 0}])
def test_the_configuration_of_another_version_is_refused(neuron_config: dict[str, object]) -> None:
    manifest = msgspec.structs.replace(sample_manifest(), config={"neuron_config": neuron_config})
    with pytest.raises(GraphAbiMismatch, match=next(iter(neuron_config))):
        read_config(manifest)


def test_weights_fit_executables_from_before_rings(tmp_path: Path) -> None:
    attributes = {"hidden_size": 64, "intermediate_size": 90, "num_attention_heads": 8, "num_key_value_heads": 2}
    tiny = write_tiny_model(tmp_path, attributes | {"sliding_window": 11}, architecture="MistralForCausalLM")
    document = {"neuron_config": {"seq_len": 128, "max_context_length": 16, "torch_dtype": "float32"}}
    config = resolve_config(document, checkpoint_dtype=None).config
    plan = plan_build(tiny.checkpoint, config.neuron_config, target="cpu")
    shards = (plan.weights.describe_shard(0, None, 0),)
    numeric_config = plan.model.description.numeric_config
    before = describe_state(replace(plan.model, largest_step=0))
    assert before != describe_state(plan.model)
    manifest = make_manifest(
        executables=(),
        config=dict(numeric_config),
        weight_sets=(WeightSet(name="model", shards=shards),),
        state=before,
        graph_abi_digest=compute_graph_abi_digest(
            graph_digests={}, shards=shards, numeric_config=numeric_config, tp_degree=1
        ),
    )
    check_weights_fit(manifest, plan)
    first, *others = before.tensors
    narrow = msgspec.structs.replace(first, shape=(*first.shape[:3], 4))
    other = msgspec.structs.replace(manifest, state=msgspec.structs.replace(before, tensors=(narrow, *others)))
    with pytest.raises(GraphAbiMismatch) as caught:
        check_weights_fit(other, plan)
    assert caught.value.metadata["attribute"] == "state.tensors"
    laid_out = msgspec.structs.replace(shards[0].tensors[0], layout="of a later release")
    shard = msgspec.structs.replace(shards[0], tensors=(laid_out, *shards[0].tensors[1:]))
    other = msgspec.structs.replace(manifest, weight_sets=(WeightSet(name="model", shards=(shard,)),))
    with pytest.raises(GraphAbiMismatch) as caught:
        check_weights_fit(other, plan)
    assert caught.value.metadata["attribute"] == f"tensors.0.{laid_out.name}.layout"
