"""Names: unknown, misplaced, deprecated, spelt otherwise, or known to NxD Inference's code alone."""

from typing import Any

import pytest

from compiler_svc.config import resolve_config
from compiler_svc.config.tables import NEURON_CONFIG, TABLES, list_model_attributes
from compiler_svc.config.tables.model_attributes import OTHERS
from compiler_svc.models.registry import list_attributes
from tests.unit.compiler_svc.config.resolving import mistakes_in, mistakes_in_document, nest, resolve, unserved_in


class TestUnknown:
    @pytest.mark.parametrize(
        ("path", "place"),
        [
            ("neuron_config.seq_length", "'seq_len'"),
            ("neuron_config.logical_nc", "'logical_nc_config'"),
            ("neuron_config.moe_tp_degre", "'moe_tp_degree'"),
            ("neuron_config.on_device_sampling_config.globaltopk", "'global_topk'"),
            ("neuron_config.lora_config.max_lora", "'max_loras'"),
            ("neuron_confg", "'neuron_config'"),
            # On the wrong level, or under the name that another program has for it.
            ("seq_len", "neuron_config.seq_len"),
            ("max_loras", "neuron_config.lora_config.max_loras"),
            ("neuron_config.temperature", "neuron_config.on_device_sampling_config.temperature"),
            ("neuron_config.act_fn", "neuron_config.router_config.act_fn"),
            ("neuron_config.rope_theta", "rope_theta at the top level"),
            ("neuron_config.hidden_size", "hidden_size at the top level"),
            ("sequence_length", "neuron_config.seq_len"),
            ("neuron_config.tensor_parallel_size", "neuron_config.tp_degree"),
            ("draft_model_path", "fused_spec_config.draft_model_path"),
        ],
    )
    def test_a_slip_or_a_name_on_the_wrong_level_is_told_what_was_meant(self, path: str, place: str) -> None:
        assert mistakes_in_document(nest(path, 3))[path].accepted.endswith(f"did you mean {place}?")

    def test_a_name_like_nothing(self) -> None:
        assert "checkpoint's config.json" in mistakes_in_document({"zzzzzz": 1})["zzzzzz"].accepted

    def test_thousands_of_names_are_refused_without_searching(self) -> None:
        found = mistakes_in(**{f"name{number}": 1 for number in range(5000)})
        assert found["neuron_config"].value == "5000 names"

    def test_a_very_long_name_is_shown_cut(self) -> None:
        (path,) = mistakes_in(**{"x" * 100_000: 1})
        assert len(path) < 100


class TestDeprecated:
    def test_logical_neuron_cores(self) -> None:
        resolution = resolve(target="trn2", logical_neuron_cores=1)
        assert resolution.config.neuron_config.logical_nc_config == 1
        (warning,) = resolution.warnings
        assert warning == "neuron_config.logical_neuron_cores: deprecated, the former name of logical_nc_config"

    @pytest.mark.parametrize(("value", "is_ignored"), [(True, False), (False, True)])
    def test_trace_tokengen_model(self, value: bool, is_ignored: bool) -> None:
        resolution = resolve(trace_tokengen_model=value)
        assert resolution.config == resolve().config
        (warning,) = resolution.warnings
        assert warning.startswith("neuron_config.trace_tokengen_model: deprecated, because the speculation options say")
        assert warning.endswith("False is ignored, and True holds") == is_ignored


class TestSpellings:
    @pytest.mark.parametrize("name", ["enable_dynamic_multi_lora", "enable-dynamic-multi-lora", "dynamic_multi_lora"])
    def test_dynamic_adapters(self, name: str) -> None:
        resolution = resolve(target="trn2", lora_config={name: True, "lora_ckpt_json": "adapters.json"})
        config: Any = resolution.config.neuron_config
        assert config.lora_config.enable_dynamic_multi_lora

    def test_keywords_of_the_router(self) -> None:
        config: Any = resolve(target="trn2", router_act_fn="sigmoid", router_dtype="bfloat16").config.neuron_config
        assert (config.router_config.act_fn, config.router_config.dtype) == ("sigmoid", "bfloat16")
        found = mistakes_in("trn2", router_act_fn="sigmoid", router_config={"act_fn": "softmax"})
        assert found["router_act_fn"].accepted == "'softmax', which router_config.act_fn says"
        assert mistakes_in("trn2", router_act_fn="gelu").keys() == {"router_config.act_fn"}

    @pytest.mark.parametrize("disable", [True, False])
    def test_the_opposite_of_normalize_top_k_affinities(self, disable: bool) -> None:
        config: Any = resolve(target="trn2", disable_normalize_top_k_affinities=disable).config
        assert config.neuron_config.normalize_top_k_affinities == (not disable)
        # NxD Inference's own files lose these values.
        assert resolve_config(config.to_json(), checkpoint_dtype=None, target="trn2").config == config

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"logical_nc_config": 2}, {"logical_neuron_cores": 1}),
            ({"normalize_top_k_affinities": True}, {"disable_normalize_top_k_affinities": True}),
        ],
    )
    def test_two_names_with_different_values(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        for given, other in ((first | second, second), (second | first, first)):
            found = mistakes_in("trn2", **given)
            assert set(found) == set(other)
            assert "which is the same attribute" in found[next(iter(other))].accepted

    def test_two_names_with_equal_values(self) -> None:
        resolution = resolve(target="trn2", logical_nc_config=1, logical_neuron_cores=1)
        assert resolution.config.neuron_config.logical_nc_config == 1

    @pytest.mark.parametrize("strategy", ["PING_PONG", "BlockShardStrategy.PING_PONG"])
    def test_words_with_a_class_before_them(self, strategy: str) -> None:
        config: Any = resolve(target="trn2", blockwise_matmul_config={"block_sharding_strategy": strategy}).config
        assert config.neuron_config.blockwise_matmul_config.block_sharding_strategy == "PING_PONG"


class TestUndocumented:
    def test_the_default_is_accepted_with_a_note(self) -> None:
        resolution = resolve(bucket_n_active_tokens=False, cp_degree=1)
        assert resolution.config == resolve().config
        (warning,) = resolution.warnings
        assert warning.startswith("neuron_config: no document names bucket_n_active_tokens, cp_degree, which")

    def test_all_defaults_are_accepted(self) -> None:
        values = {"target": "cpu", "checkpoint_dtype": None, "outer": {"outer": {}}}
        for attribute in NEURON_CONFIG.rows:
            values[attribute.name] = attribute.default_from(values)
        defaults = {attribute.name: values[attribute.name] for attribute in NEURON_CONFIG.unrecorded}
        document = {"neuron_config": defaults}
        assert resolve_config(document, checkpoint_dtype=None, target="cpu").config == resolve().config

    @pytest.mark.parametrize(
        ("name", "value"),
        [("bucket_n_active_tokens", True), ("cp_degree", 2), ("token_tree_config", {}), ("pp_degree", 2)],
    )
    @pytest.mark.parametrize("target", ["cpu", "trn2"])
    def test_other_values_are_not_served(self, name: str, value: Any, target: Any) -> None:
        assert set(unserved_in(target, **{name: value})) == {name}

    @pytest.mark.parametrize(
        ("outer", "name", "default", "other"),
        [
            ("", "sliding_window_attention_dp_degree", 1, 2),
            ("", "skip_vision", False, True),
            ("", "default_image_width", None, 640),
            ("routed_experts_mlp_ops_config", "hidden_size_actual", None, 2880),
            ("routed_experts_mlp_ops_config", "expert_distribution", None, [[0, 1]]),
            ("routed_experts_mlp_ops_config", "local_redudancy_degree", None, [[1, 1]]),
            ("moe_fused_tkg_config", "norm_topk_prob", False, True),
            ("moe_fused_tkg_config", "is_mxfp4_compute", None, True),
            ("moe_fused_tkg_config", "router_mm_dtype", "float32", "bfloat16"),
        ],
    )
    def test_those_of_classes_for_single_models(self, outer: str, name: str, default: Any, other: Any) -> None:
        accepted, refused = ({outer: {name: value}} if outer else {name: value} for value in (default, other))
        resolve(target="trn2", **accepted)
        assert {path.rpartition(".")[2] for path in unserved_in("trn2", **refused)} == {name}

    def test_the_names_by_which_nxd_reads_a_router(self) -> None:
        given = {"router_act_fn": "sigmoid", "router_dtype": "bfloat16"}
        config: Any = resolve(target="trn2", router_config=given).config
        router = config.neuron_config.router_config
        assert (router.act_fn, router.dtype) == ("sigmoid", "bfloat16")

    def test_a_python_hook_is_refused(self) -> None:
        found = mistakes_in_document({"load_config": "hook"})
        assert found["load_config"].accepted.startswith("unset: it is a Python hook")


class TestModelAttributes:
    def test_none_is_an_attribute_of_the_top_level(self) -> None:
        sections = {name for attribute in TABLES["InferenceConfig"].rows for name in attribute.names}
        assert not list_model_attributes() & sections

    def test_each_is_stated_once(self) -> None:
        assert not OTHERS & list_attributes({})
        assert list_model_attributes() > list_attributes({})
