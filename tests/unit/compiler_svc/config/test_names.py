"""Names: unknown, misplaced, deprecated, spelt otherwise, or known to NxD Inference's code alone."""

from typing import Any

import pytest

from compiler_svc.config import MoENeuronConfig, resolve_config
from compiler_svc.config.tables import MODEL_ATTRIBUTES, NEURON_CONFIG, TABLES
from compiler_svc.config.tables.transformers_neuronx import TRANSFORMERS_NEURONX
from compiler_svc.config.transformers_neuronx import translate_transformers_neuronx
from tests.unit.compiler_svc.config.resolving import mistakes_in, mistakes_in_document, resolve, unserved_in


class TestUnknown:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("seq_length", "seq_len"),
            ("logical_nc", "logical_nc_config"),
            ("moe_tp_degre", "moe_tp_degree"),
        ],
    )
    def test_a_slip_is_told_what_was_meant(self, name: str, meant: str) -> None:
        assert mistakes_in(**{name: 3})[name].accepted == f"did you mean {meant!r}?"

    def test_slips_inside(self) -> None:
        found = mistakes_in(on_device_sampling_config={"globaltopk": 2}, lora_config={"max_lora": 2})
        assert found["on_device_sampling_config.globaltopk"].accepted == "did you mean 'global_topk'?"
        assert found["lora_config.max_lora"].accepted == "did you mean 'max_loras'?"

    @pytest.mark.parametrize(
        ("document", "path", "place"),
        [
            ({"seq_len": 64}, "seq_len", "neuron_config.seq_len"),
            ({"max_loras": 2}, "max_loras", "neuron_config.lora_config.max_loras"),
            (
                {"neuron_config": {"temperature": 0.5}},
                "neuron_config.temperature",
                "neuron_config.on_device_sampling_config.temperature",
            ),
            ({"neuron_config": {"act_fn": "softmax"}}, "neuron_config.act_fn", "neuron_config.router_config.act_fn"),
            ({"neuron_config": {"rope_theta": 1e4}}, "neuron_config.rope_theta", "rope_theta at the top level"),
            ({"neuron_config": {"hidden_size": 64}}, "neuron_config.hidden_size", "hidden_size at the top level"),
            ({"sequence_length": 64}, "sequence_length", "neuron_config.seq_len"),
            (
                {"neuron_config": {"tensor_parallel_size": 2}},
                "neuron_config.tensor_parallel_size",
                "neuron_config.tp_degree",
            ),
            ({"draft_model_path": "x"}, "draft_model_path", "fused_spec_config.draft_model_path"),
        ],
    )
    def test_a_name_on_the_wrong_level_is_told_its_place(self, document: dict[str, Any], path: str, place: str) -> None:
        assert mistakes_in_document(document)[path].accepted.endswith(f"did you mean {place}?")

    def test_a_name_like_nothing(self) -> None:
        accepted = mistakes_in_document({"zzzzzz": 1})["zzzzzz"].accepted
        assert "checkpoint's config.json" in accepted

    def test_a_section_with_a_slip(self) -> None:
        assert mistakes_in_document({"neuron_confg": {}})["neuron_confg"].accepted == "did you mean 'neuron_config'?"

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
        adapters = resolution.config.neuron_config.lora_config
        assert adapters is not None
        assert adapters.enable_dynamic_multi_lora

    def test_keywords_of_the_router(self) -> None:
        config = resolve(target="trn2", router_act_fn="sigmoid", router_dtype="bfloat16").config.neuron_config
        assert isinstance(config, MoENeuronConfig)
        assert (config.router_config.act_fn, config.router_config.dtype) == ("sigmoid", "bfloat16")
        found = mistakes_in("trn2", router_act_fn="sigmoid", router_config={"act_fn": "softmax"})
        assert found["router_act_fn"].accepted == "'softmax', which router_config.act_fn says"
        assert mistakes_in("trn2", router_act_fn="gelu").keys() == {"router_config.act_fn"}

    @pytest.mark.parametrize("disable", [True, False])
    def test_the_opposite_of_normalize_top_k_affinities(self, disable: bool) -> None:
        config = resolve(target="trn2", disable_normalize_top_k_affinities=disable).config
        assert isinstance(config.neuron_config, MoENeuronConfig)
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
        config = resolve(target="trn2", blockwise_matmul_config={"block_sharding_strategy": strategy}).config
        assert isinstance(config.neuron_config, MoENeuronConfig)
        assert config.neuron_config.blockwise_matmul_config.block_sharding_strategy == "PING_PONG"

    def test_options_of_transformers_neuronx_are_those_of_the_table(self) -> None:
        samples: dict[str, Any] = {
            "batch_size": 4,
            "tp_degree": 2,
            "n_positions": [128, 256],
            "context_length_estimate": [64],
            "prompt_batch_size": 1,
            "amp": "bf16",
            "group_query_attention": "shard-over-heads",
            "on_device_generation": {
                "max_length": 256,
                "do_sample": True,
                "top_k": 5,
                "top_p": 0.9,
                "temperature": 0.5,
                "dynamic": True,
                "global_top_k": 64,
            },
            "quant": {"quant_dtype": "s8", "dequant_dtype": "bf16"},
            "fuse_qkv": False,
        }
        outer, generation, quantization = TRANSFORMERS_NEURONX.values()
        assert list(samples) == [option.name for option in outer]
        assert list(samples["on_device_generation"]) == [option.name for option in generation]
        assert list(samples["quant"]) == [option.name for option in quantization]
        assert not translate_transformers_neuronx(samples).violations


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

    def test_a_python_hook_is_refused(self) -> None:
        found = mistakes_in_document({"load_config": "hook"})
        assert found["load_config"].accepted.startswith("unset: it is a Python hook")


class TestModelAttributes:
    def test_they_stand_at_the_top_level_and_survive(self) -> None:
        document = {"rope_theta": 1e4, "hidden_size": 64, "neuron_config": {"seq_len": 64}}
        config = resolve_config(document, checkpoint_dtype=None).config
        assert config.model_attributes == {"rope_theta": 1e4, "hidden_size": 64}
        assert resolve_config(config.to_json(), checkpoint_dtype=None).config == config

    def test_none_is_an_attribute_of_the_top_level(self) -> None:
        sections = {name for attribute in TABLES["InferenceConfig"].rows for name in attribute.names}
        assert not MODEL_ATTRIBUTES & sections
