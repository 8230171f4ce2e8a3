"""The configuration that a bundle was compiled with, and which weights fit it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from bundle.abi.digest import compute_graph_abi_digest
from bundle.consistency import check_consistency
from bundle.manifest import Manifest, Target, WeightSet
from compiler_svc.builds.build import Build
from compiler_svc.builds.executable_stage import BuiltExecutable, TracedExecutable
from compiler_svc.builds.manifest_stage import describe_bundle
from compiler_svc.builds.weight_stage import with_shards
from compiler_svc.config import InferenceConfig, resolve_config
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.errors import GraphAbiMismatch
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import Adapters, with_adapters
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.planning.job_spec import CompileJobSpec
from compiler_svc.planning.weights_fit import check_weights_fit, read_config
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_state, describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from targets.cpu import EXPORTED_PROGRAM
from tests.bundles.manifests import DIGEST, make_manifest
from tests.bundles.samples import sample_manifest
from tests.checkpoints.tiny_models import GEOMETRIES, write_tiny_model


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


def test_room_for_adapters_is_part_of_what_weights_must_fit(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["mha-bias-untied"])
    config = resolve_config({"neuron_config": {"seq_len": 32, "tp_degree": 2}}, checkpoint_dtype="float32").config
    plain = plan_build(tiny.checkpoint, config.neuron_config, target="cpu")
    manifests: list[tuple[BuildPlan, Manifest]] = []
    for plan in (plain, add_adapters(plain, slots=3), add_adapters(plain, slots=4)):
        manifest = describe(tiny.checkpoint, plan, config)
        manifests.append((plan, manifest))
        check_consistency(manifest)
        check_weights_fit(manifest, plan)
        with_others = with_shards(manifest, tuple(reversed(manifest.weight_sets[0].shards)))
        assert with_others.weight_sets[1:] == manifest.weight_sets[1:]
        assert with_others.weight_sets[0] != manifest.weight_sets[0]
    model, adapters = manifest.weight_sets
    assert not any(".lora_" in tensor.name for shard in model.shards for tensor in shard.tensors)
    assert (adapters.name, adapters.is_mutable, [one.rank for one in adapters.shards]) == ("adapters", True, [0, 1])
    shapes = {tensor.name: tensor.shape for tensor in adapters.shards[1].tensors}
    assert shapes["model.layers.1.mlp.down_proj.lora_A"] == (4, 5, 50)
    assert shapes["model.layers.1.self_attn.k_proj.lora_B"] == (4, 24, 5)
    assert [len(one.weight_sets) for _, one in manifests] == [1, 2, 2]
    for plan, manifest in manifests:
        for other in (one for one, _ in manifests if one is not plan):
            with pytest.raises(GraphAbiMismatch) as caught:
                check_weights_fit(manifest, other)
            assert caught.value.metadata["attribute"] == "graph_abi_digest"


def add_adapters(plan: BuildPlan, *, slots: int) -> BuildPlan:
    """What a configuration will do that asks for adapters."""
    adapters = Adapters(slots=AdapterSlots(slots=slots, rank=5))
    return replace(plan, model=replace(plan.model, description=with_adapters(plan.model.description, adapters)))


def describe(checkpoint: Checkpoint, plan: BuildPlan, config: InferenceConfig) -> Manifest:
    """The manifest of a build at optimization level 0 that left out the weights."""
    submodel = describe_submodel(plan.model, "token_generation", 32)
    graph = export_submodel(plan.model, plan.weights, submodel)
    traced = TracedExecutable(
        spec=submodel,
        graph_digest=graph.graph_digest,
        constants=graph.constants,
        action_digest=DIGEST,
        shares_with=None,
        cached=None,
        finished=None,
        job=None,
    )
    lowered = CachedExecutable(
        blob=DIGEST,
        size_bytes=1,
        format=EXPORTED_PROGRAM.name,
        state_convention=EXPORTED_PROGRAM.state_convention,
        constants=tuple(one.name for one in graph.constants),
    )
    spec = CompileJobSpec(
        name="tiny",
        model=checkpoint.path,
        model_roots=(),
        warnings=(),
        config=config,
        skip_cache_lookup=False,
        target=Target(kind="cpu", isa="x86-64-v3"),
        optimization_level=0,
        salt="",
    )
    job = SimpleNamespace(checkpoint_digest=DIGEST)
    build = SimpleNamespace(job=job, spec=spec, checkpoint=checkpoint, plan=plan, layout=None)
    shards = [plan.weights.describe_shard(rank, None, 0) for rank in range(plan.model.tp_degree)]
    return describe_bundle(cast("Build", build), [BuiltExecutable(traced, lowered, None)], shards, ())
