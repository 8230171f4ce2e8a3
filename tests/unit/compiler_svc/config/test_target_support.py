"""What targets make of attributes: served, a hint, for later, planned or refused."""

import re
from typing import Any

import pytest

from compiler_svc.config import TARGET_KINDS, Hint, Resolution, TargetKind, resolve_config
from compiler_svc.config.attribute import Attribute
from compiler_svc.config.tables import NEURON_CONFIG, TABLES
from compiler_svc.errors import ConfigInvalid, FeatureNotServed
from tests.unit.compiler_svc.config.resolving import mistakes_in, resolve

TWO_CORES = {"neuron_config": {"logical_nc_config": 2}}
EVERY_ATTRIBUTE = [
    pytest.param(attribute, id=f"{table.class_name}.{attribute.name}")
    for table in TABLES.values()
    for attribute in table.rows
]


@pytest.mark.parametrize("attribute", EVERY_ATTRIBUTE)
def test_every_target_has_an_answer_and_says_why(attribute: Attribute) -> None:
    compiled = attribute.support_on("trn2", compiles=True)
    assert compiled.level != "planned"
    assert compiled.level != "hint" or compiled.reason
    for target in TARGET_KINDS:
        support = attribute.support_on(target)
        assert bool(support.reason) == (support.level in ("hint", "refused")), target
        assert support.level != "planned" or target != "cpu"
        assert support.level != "honoured" or target == "cpu"


class TestNotServed:
    @pytest.mark.parametrize(
        "values",
        [
            {"return_expert_index": True},
            {"speculation_length": 4},
            {"flash_decoding_enabled": True},
            {"return_router_logits": True},
            {"routed_experts_mlp_ops_config": {}},
            {"flash_decoding_enabled": True, "return_expert_index": True},
        ],
    )
    def test_each_is_named(self, values: dict[str, Any]) -> None:
        with pytest.raises(FeatureNotServed) as caught:
            resolve(**values)
        assert caught.value.metadata["features"].split(",") == [f"neuron_config.{name}" for name in values]
        assert {one.field for one in caught.value.violations} == {f"neuron_config.{name}" for name in values}
        assert all(one.accepted.endswith("all that this version serves") for one in caught.value.violations)

    def test_false_is_not_zero(self) -> None:
        assert "0" in mistakes_in(kv_cache_quant=0)["kv_cache_quant"].value

    @pytest.mark.parametrize(
        "values",
        [
            {"router_config": {}},
            {"router_config": {"act_fn": "softmax"}},
            {"moe_tp_degree": 1},
            {"flash_decoding_enabled": False},
            # Served, or the default.
            {"kv_cache_quant": True},
            {"batch_size": 4, "is_continuous_batching": True},
            {"output_logits": True, "on_device_sampling_config": {"dynamic": True, "global_topk": 64, "top_k": 5}},
            {"save_sharded_checkpoint": False},
            {"skip_sharding": True},
            {"logical_nc_config": 1},
            {"mlp_kernel_enabled": False},
        ],
    )
    def test_what_is_served_has_no_warning(self, values: dict[str, Any]) -> None:
        assert resolve(**values).warnings == ()

    @pytest.mark.parametrize("tp_degree", [1, 2, 3, 64])
    def test_every_degree_is_served(self, tp_degree: int) -> None:
        """Whether a model can be split into as many parts is checked when the model is known."""
        resolution = resolve(tp_degree=tp_degree, rpl_reduce_dtype="bfloat16")
        assert resolution.config.neuron_config.tp_degree == tp_degree
        assert any("rpl_reduce_dtype" in warning for warning in resolution.warnings) == (tp_degree == 1)


class TestHints:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("logical_nc_config", 2),
            ("sequence_parallel_enabled", True),
            ("attn_kernel_enabled", True),
            ("attn_kernel_enabled", False),
            ("mlp_kernel_enabled", True),
            ("cc_pipeline_tiling_factor", 4),
            ("scratchpad_page_size", 1024),
            ("weights_to_skip_layout_optimization", ["lm_head.weight"]),
            ("is_continuous_batching", False),
            ("use_index_calc_kernel", True),
            ("overrides_torch_dtype", True),
            ("is_chunked_prefill", True),
            ("chunked_prefill_config", {"max_num_seqs": 4}),
        ],
    )
    def test_what_cpu_ignores_is_recorded_with_a_reason(self, name: str, value: Any) -> None:
        resolution = resolve(**{name: value})
        (hint,) = resolution.hints
        assert hint.field == f"neuron_config.{name}"
        assert hint.value == (tuple(value) if isinstance(value, list) else value)
        assert hint.reason
        assert str(hint) in resolution.warnings
        assert " is ignored: " in str(hint)

    def test_inside(self) -> None:
        path, reason = "neuron_config.blockwise_matmul_config.block_size", "the compiler chooses this target's kernels"
        assert resolve(blockwise_matmul_config={"block_size": 256}).hints == (Hint(path, 256, reason),)

    def test_neuron_targets_count_what_changes_a_plan(self) -> None:
        resolution = resolve(target="trn2", cc_pipeline_tiling_factor=4, sequence_parallel_enabled=True)
        (hint,) = resolution.hints
        assert hint == Hint("neuron_config.cc_pipeline_tiling_factor", 4, "no size of a plan depends on it")
        assert resolution.config.neuron_config.cc_pipeline_tiling_factor == 4

    def test_experts_are_no_silence(self) -> None:
        given = {"capacity_factor": 2.0, "fused_shared_experts": True, "router_config": {"act_fn": "sigmoid"}}
        hints = {hint.field.removeprefix("neuron_config.") for hint in resolve(target="trn2", **given).hints}
        assert hints == {"capacity_factor", "fused_shared_experts", "router_config.act_fn"}


class TestRefused:
    @pytest.mark.parametrize("target", ["inf2", "trn1"])
    def test_two_physical_cores_where_there_is_one(self, target: TargetKind) -> None:
        accepted = "1: a logical core is one physical core there (NxD Inference API guide, General configuration)"
        for compiles in (False, True):
            with pytest.raises(ConfigInvalid, match=re.escape(accepted)):
                resolve_config(TWO_CORES, checkpoint_dtype=None, target=target, compiles=compiles)
        assert resolve(target=target, logical_nc_config=1).warnings == ()

    @pytest.mark.parametrize("target", ["inf2", "trn1", "trn2", "trn3"])
    def test_weights_in_groups_where_nxd_has_none(self, target: TargetKind) -> None:
        document = {"neuron_config": {"quantized": True, "quantization_dtype": "int4"}}
        for compiles in (False, True):
            with pytest.raises(ConfigInvalid) as refused:
                resolve_config(document, checkpoint_dtype=None, target=target, compiles=compiles)
            (violation,) = refused.value.violations
            assert (violation.field, violation.value) == ("neuron_config.quantization_dtype", "'int4'")
            assert violation.accepted.startswith("'int8', 'f8e4m3' or 'f8e5m2' on NeuronCores: NxD has no groups")
        assert resolve(**document["neuron_config"]).config.neuron_config.quantization_dtype == "int4"

    @pytest.mark.parametrize("target", TARGET_KINDS)
    def test_initializing_weights(self, target: TargetKind) -> None:
        found = mistakes_in(target, routed_experts_mlp_ops_config={"input_layer_init_method": "xavier"})
        path = "routed_experts_mlp_ops_config.input_layer_init_method"
        assert found[path].accepted.startswith("unset: weights come from a checkpoint")


def test_every_attribute_of_cpu_at_its_default_is_accepted() -> None:
    config = resolve_config({}, checkpoint_dtype=None).config
    # What the target does in any case is a hint even at the default.
    done = {attribute.name for attribute in NEURON_CONFIG.rows if attribute.support_on("cpu").acts_as is not None}
    given = {name: value for name, value in config.to_json()["neuron_config"].items() if name not in done}
    again = resolve_config({"neuron_config": given}, checkpoint_dtype=None)
    assert again.config == config
    assert again.hints == ()
    assert {attribute.name for attribute in NEURON_CONFIG.attributes} >= set(given)


class TestCompilesForNeuron:
    """What a compile for trn2 serves; a plan takes more."""

    @staticmethod
    def resolve(**values: Any) -> Resolution:
        return resolve_config({"neuron_config": values}, checkpoint_dtype="bfloat16", target="trn2", compiles=True)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("logical_nc_config", 1),
            ("scratchpad_page_size", 512),
            ("cc_pipeline_tiling_factor", 8),
            ("attn_kernel_enabled", False),
            ("tp_degree", 8),
            ("fused_qkv", True),
            ("quantized", True),
            ("quantization_dtype", "f8e4m3"),
            ("quantization_type", "per_channel_symmetric"),
        ],
    )
    def test_honoured(self, name: str, value: Any) -> None:
        resolution = self.resolve(**{name: value})
        assert getattr(resolution.config.neuron_config, name) == value
        assert resolution.hints == ()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("attn_kernel_enabled", True),
            ("mlp_kernel_enabled", True),
            ("sequence_parallel_enabled", True),
            ("tile_cc", True),
            ("k_cache_transposed", True),
            ("dma_order_config", {"x": 1}),
        ],
    )
    def test_refused_by_name_and_planned_all_the_same(self, name: str, value: Any) -> None:
        with pytest.raises(FeatureNotServed) as refused:
            self.resolve(**{name: value, "torch_dtype": "bfloat16"})
        assert [one.field for one in refused.value.violations] == [f"neuron_config.{name}"]
        resolve(target="trn2", **{name: value, "torch_dtype": "bfloat16"})

    @pytest.mark.parametrize(
        ("name", "value"),
        [("weights_to_skip_layout_optimization", ["lm_head.weight"]), ("overrides_torch_dtype", True)],
    )
    def test_ignored_with_a_reason(self, name: str, value: Any) -> None:
        (hint,) = self.resolve(**{name: value}).hints
        assert (hint.field, bool(hint.reason)) == (f"neuron_config.{name}", True)
