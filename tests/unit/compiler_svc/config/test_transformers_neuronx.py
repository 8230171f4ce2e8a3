"""Transformers NeuronX's names."""

from typing import Any

import pytest

from compiler_svc.config import Resolution, resolve_config
from compiler_svc.config.domains import Choice, Flag
from compiler_svc.config.tables.transformers_neuronx import CODE_OPTIONS, CODE_SUBOPTIONS, CodeOption
from compiler_svc.config.transformers_neuronx import SECTION, translate_transformers_neuronx, validate_head_sharding
from compiler_svc.errors import ConfigInvalid, FeatureNotServed


def test_every_option() -> None:
    translation = translate_transformers_neuronx(
        {
            "batch_size": 5,
            "tp_degree": 2,
            "prompt_batch_size": 1,
            "n_positions": [128, 256, 512, 1024, 2048, 3072],
            "context_length_estimate": [1024, 1280, 1536, 1792, 2048],
            "amp": "f16",
            "group_query_attention": "shard-over-heads",
            "on_device_generation": {"max_length": 3072, "do_sample": True, "top_k": 10},
            "quant": {"quant_dtype": "s8", "dequant_dtype": "f16"},
            "fuse_qkv": True,
        }
    )
    assert translation.violations == translation.unserved == []
    assert translation.values == {
        "batch_size": 5,
        "tp_degree": 2,
        "ctx_batch_size": 1,
        "seq_len": 3072,
        "enable_bucketing": True,
        "token_generation_buckets": [128, 256, 512, 1024, 2048, 3072],
        "context_encoding_buckets": [1024, 1280, 1536, 1792, 2048],
        "torch_dtype": "float16",
        "on_device_sampling_config": {"do_sample": True, "top_k": 10},
        "quantized": True,
        "quantization_dtype": "int8",
        "fused_qkv": True,
    }
    assert translation.paths.keys() >= translation.values.keys()


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("neuron_config.ctx_batch_size", "prompt_batch_size"),
        ("neuron_config.seq_len", "n_positions"),
        ("neuron_config.on_device_sampling_config", "on_device_generation"),
        ("neuron_config.on_device_sampling_config.top_p", "on_device_generation.top_p"),
        ("neuron_config.on_device_sampling_config.global_topk", "on_device_generation.global_top_k"),
    ],
)
def test_a_mistake_is_named_where_it_was_made(path: str, where: str) -> None:
    section = {"prompt_batch_size": 0, "n_positions": 128, "on_device_generation": {"global_top_k": -1}}
    translation = translate_transformers_neuronx(section)
    assert translation.locate(path) == f"transformers_neuronx.{where}"
    assert translation.locate("neuron_config.batch_size") == "neuron_config.batch_size"
    assert translation.locate("seq_len") == "seq_len"


@pytest.mark.parametrize(
    ("n_positions", "seq_len", "token_generation", "context_encoding"),
    [
        (1024, 1024, [128, 256, 512, 1024], [64, 128, 256, 512]),
        ([1024], 1024, [128, 256, 512, 1024], [64, 128, 256, 512]),
        (1500, 1500, [128, 256, 512, 1024, 1500], [64, 128, 256, 512, 750]),
        (181, 181, [128, 181], [64, 90]),
        (128, 128, [128], [64]),
        (100, 100, [100], [50]),
        (1, 1, [1], [1]),
        ([300, 301], 301, [300, 301], [150]),
    ],
)
def test_buckets_by_default(
    n_positions: Any, seq_len: int, token_generation: list[int], context_encoding: list[int]
) -> None:
    values = translate_transformers_neuronx({"n_positions": n_positions}).values
    assert values == {
        "seq_len": seq_len,
        "enable_bucketing": True,
        "token_generation_buckets": token_generation,
        "context_encoding_buckets": context_encoding,
    }


def test_one_prompt_length_is_one_bucket() -> None:
    values = translate_transformers_neuronx({"n_positions": 128, "context_length_estimate": 64}).values
    assert values["context_encoding_buckets"] == [64]
    assert translate_transformers_neuronx({"context_length_estimate": 64}).values == {
        "enable_bucketing": True,
        "context_encoding_buckets": [64],
    }


class TestExamplesOfTheGuide:
    """Its examples leave `n_positions` unset, and quantize without a quantized checkpoint."""

    def resolve(self, section: dict[str, Any], **neuron_config: Any) -> Resolution:
        document = {"transformers_neuronx": section, "neuron_config": neuron_config}
        return resolve_config(document, checkpoint_dtype="float32", target="trn2")

    def test_prompts_alone_have_lengths(self) -> None:
        resolution = self.resolve({"prompt_batch_size": 1, "batch_size": 5, "context_length_estimate": 256})
        config = resolution.config.neuron_config
        assert (config.seq_len, config.context_encoding_buckets, config.token_generation_buckets) == (
            512,
            (256,),
            (128, 256, 512),
        )
        assert (config.ctx_batch_size, config.max_batch_size) == (1, 5)
        assert resolution.warnings[0].startswith("transformers_neuronx.n_positions: unset, so sequences get 512 tokens")

    def test_a_length_of_sequences_that_is_given_counts(self) -> None:
        assert self.resolve({"context_length_estimate": 256}, seq_len=300).config.neuron_config.seq_len == 300
        generation = {"max_length": 260}
        section = {"context_length_estimate": 256, "on_device_generation": generation}
        assert self.resolve(section).config.neuron_config.seq_len == 260

    def test_quantized_weights_need_no_path(self) -> None:
        section = {"quant": {"quant_dtype": "s8", "dequant_dtype": "bf16"}, "amp": "bf16"}
        config = self.resolve(section).config.neuron_config
        assert (config.quantized, config.quantization_dtype, config.quantized_checkpoints_path) == (True, "int8", None)
        with pytest.raises(ConfigInvalid, match="quantized_checkpoints_path"):
            self.resolve({}, quantized=True)


@pytest.mark.parametrize(("amp", "dtype"), [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")])
def test_amp(amp: str, dtype: str) -> None:
    assert translate_transformers_neuronx({"amp": amp}).values == {"torch_dtype": dtype}


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({}, {}),
        ({"do_sample": False}, {"do_sample": False}),
        ({"do_sample": True}, {"do_sample": True, "top_k": 50}),
        ({"dynamic": True, "global_top_k": 64}, {"dynamic": True, "global_topk": 64, "top_k": 50}),
        (
            {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 2.0, "dynamic": None},
            {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 2.0},
        ),
    ],
)
def test_generation_on_the_device(generation: dict[str, Any], sampling: dict[str, Any]) -> None:
    translation = translate_transformers_neuronx({"on_device_generation": generation})
    assert translation.values == {"on_device_sampling_config": sampling}


def test_the_longest_generation_is_the_longest_sequence() -> None:
    translation = translate_transformers_neuronx({"on_device_generation": {"max_length": 256}})
    assert translation.values["seq_len"] == 256
    assert translation.paths["seq_len"] == "transformers_neuronx.on_device_generation.max_length"


def test_dtype_of_quantized_weights_where_amp_is_unset() -> None:
    quant = {"quant_dtype": "s8", "dequant_dtype": "bf16"}
    assert translate_transformers_neuronx({"quant": quant}).values["torch_dtype"] == "bfloat16"


def test_how_weights_are_quantized() -> None:
    quant = {"quant_dtype": "s8", "quantize_method": "vector_dynamic", "quantize_attn": False, "no_quantize_list": []}
    translation = translate_transformers_neuronx({"quant": quant})
    assert translation.values == {
        "quantized": True,
        "quantization_dtype": "int8",
        "quantization_type": "per_channel_symmetric",
        "modules_to_not_convert": ["self_attn"],
    }
    assert translation.locate("neuron_config.modules_to_not_convert") == f"{SECTION}.quant.quantize_attn"
    whole = translate_transformers_neuronx({"quant": quant | {"quantize_attn": True}})
    assert "modules_to_not_convert" not in whole.values
    assert translation.violations == translation.unserved == whole.violations == whole.unserved == []


def test_a_quantized_kv_cache() -> None:
    served = {"quant_dtype": "f8e4m3fn", "quantize_method": "direct_cast", "dequant_dtype": "bf16"}
    translation = translate_transformers_neuronx({"kv_cache_quant": served})
    assert translation.values == {"kv_cache_quant": True, "torch_dtype": "bfloat16"}
    assert translation.violations == translation.unserved == []
    config = resolve_config({SECTION: {"kv_cache_quant": served}}, checkpoint_dtype=None, target="trn2").config
    assert config.neuron_config.kv_cache_quant


def test_random_numbers_that_are_none() -> None:
    section = {"on_device_generation": {"do_sample": True, "deterministic": True, "top_p_min_tokens": 1}}
    resolution = resolve_config({SECTION: section}, checkpoint_dtype=None)
    sampling = resolution.config.neuron_config.on_device_sampling_config
    assert sampling is not None
    assert sampling.deterministic


def test_a_suboption_that_is_a_hint() -> None:
    section = {"on_device_generation": {"dynamic": True, "per_batch_line": True}}
    (hint,) = resolve_config({SECTION: section}, checkpoint_dtype=None).hints
    assert (hint.field, hint.value) == (f"{SECTION}.on_device_generation.per_batch_line", True)


@pytest.mark.parametrize(
    ("section", "path", "served"),
    [
        ({"on_device_generation": {"top_p_min_tokens": 2}}, "on_device_generation.top_p_min_tokens", "1: top_p keeps"),
        ({"on_device_generation": {"eos_token_id": 2}}, "on_device_generation.eos_token_id", "unset: the checkpoint"),
        (
            {"quant": {"quant_dtype": "s8", "no_quantize_list": ["model.layers.1"]}},
            "quant.no_quantize_list",
            "[]: neuron_config.modules_to_not_convert",
        ),
        ({"kv_cache_quant": {"quant_dtype": "s8"}}, "kv_cache_quant.quant_dtype", "'f8e4m3fn': the KV cache"),
        # The library's default.
        ({"kv_cache_quant": {}}, "kv_cache_quant.quant_dtype", "'f8e4m3fn': the KV cache"),
    ],
)
def test_suboptions_that_are_not_served(section: dict[str, Any], path: str, served: str) -> None:
    translation = translate_transformers_neuronx(section)
    assert translation.violations == []
    (violation,) = translation.unserved
    assert violation.field == f"{SECTION}.{path}"
    assert violation.accepted.startswith(served)


@pytest.mark.parametrize("option", [one for row in CODE_SUBOPTIONS.values() for one in row], ids=lambda one: one.name)
def test_every_suboption_has_one_outcome(option: CodeOption) -> None:
    assert [bool(one) for one in (option.becomes, option.hint, option.refused)].count(True) == 1
    assert option.means is None or option.becomes


def test_unset_is_unset() -> None:
    names = ("batch_size", "n_positions", "context_length_estimate", "amp", "on_device_generation", "quant")
    assert translate_transformers_neuronx(dict.fromkeys(names)).values == {}


@pytest.mark.parametrize(
    ("section", "path", "accepted"),
    [
        ({"n_position": 3}, "n_position", "did you mean 'n_positions'?"),
        ({"zebra": 3}, "zebra", "one of batch_size, "),
        ({"n_positions": []}, "n_positions", "an integer from 1 to 134217728, or a list"),
        ({"n_positions": [256, 128]}, "n_positions", "each larger than the one before"),
        ({"n_positions": True}, "n_positions", "an integer from 1"),
        ({"context_length_estimate": 0}, "context_length_estimate", "an integer from 1"),
        ({"context_length_estimate": ["64"]}, "context_length_estimate", "an integer from 1"),
        ({"amp": "float32"}, "amp", "'f32', 'f16', 'bf16'"),
        ({"amp": ["f32"]}, "amp", "'f32', 'f16', 'bf16'"),
        ({"group_query_attention": "heads"}, "group_query_attention", "'shard-over-heads', 'shard-over-batch'"),
        ({"on_device_generation": 3}, "on_device_generation", "an object"),
        ({"on_device_generation": {"topk": 3}}, "on_device_generation.topk", "did you mean 'top_k'?"),
        (
            {"n_positions": 128, "on_device_generation": {"max_length": 64}},
            "on_device_generation.max_length",
            "the longest of n_positions, which is 128",
        ),
        (
            {"on_device_generation": {"zebra": 3}},
            "on_device_generation.zebra",
            "max_length, deterministic, top_p_min_tokens, eos_token_id, per_batch_line",
        ),
        ({"on_device_generation": {"deterministic": 1}}, "on_device_generation.deterministic", "true or false"),
        (
            {"on_device_generation": {"top_p_min_tokens": 0}},
            "on_device_generation.top_p_min_tokens",
            "an integer from 1",
        ),
        ({"quant": "s8"}, "quant", "an object"),
        (
            {"quant": {"quant_dtype": "s8", "zebra": 3}},
            "quant.zebra",
            "one of quant_dtype, dequant_dtype, quantize_method, quantize_attn, no_quantize_list",
        ),
        (
            {"quant": {"quant_dtype": "s8", "quantize_method": "direct_cast"}},
            "quant.quantize_method",
            "'vector_dynamic'",
        ),
        ({"kv_cache_quant": True}, "kv_cache_quant", "an object"),
        (
            {"kv_cache_quant": {"quant_dtype": "f8e4m3fn", "zebra": 3}},
            "kv_cache_quant.zebra",
            "one of quant_dtype, quantize_method, dequant_dtype",
        ),
        ({"kv_cache_quant": {"quant_dtype": "f8e5m2"}}, "kv_cache_quant.quant_dtype", "'s8', 'f16', 'bf16'"),
        (
            {"quant": {"quant_dtype": "s8", "dequant_dtype": "f16"}, "kv_cache_quant": {"dequant_dtype": "bf16"}},
            "kv_cache_quant.dequant_dtype",
            "quant.dequant_dtype, which is 'f16'",
        ),
        ({"quant": {"quant_dtype": "s4"}}, "quant.quant_dtype", "'s8' (Transformers NeuronX developer guide"),
        ({"quant": {"quant_dtype": "s8", "dequant_dtype": "s8"}}, "quant.dequant_dtype", "'f32', 'f16', 'bf16'"),
        (
            {"amp": "bf16", "quant": {"quant_dtype": "s8", "dequant_dtype": "f16"}},
            "quant.dequant_dtype",
            "amp, which is 'bf16'",
        ),
    ],
)
def test_a_mistake(section: dict[str, Any], path: str, accepted: str) -> None:
    violations = translate_transformers_neuronx(section).violations
    assert violations[0].field == f"transformers_neuronx.{path}"
    assert accepted in violations[0].accepted


@pytest.mark.parametrize("strategy", ["shard-over-batch", "all-gather-heads"])
def test_strategies_that_are_not_served(strategy: str) -> None:
    translation = translate_transformers_neuronx({"group_query_attention": strategy})
    assert translation.violations == []
    assert [violation.field for violation in translation.unserved] == ["transformers_neuronx.group_query_attention"]
    assert "'shard-over-heads', 'replicated-heads'" in translation.unserved[0].accepted


@pytest.mark.parametrize(
    ("strategy", "num_key_value_heads", "tp_degree", "accepted"),
    [
        (None, 2, 4, None),
        ("shard-over-heads", 8, 1, None),
        ("shard-over-heads", 8, 4, None),
        ("shard-over-heads", 2, 4, "'replicated-heads': the model's 2 KV heads are no multiple of tp_degree"),
        ("shard-over-heads", 3, 2, "'replicated-heads'"),
        ("replicated-heads", 2, 4, None),
        ("replicated-heads", 2, 1, None),
        ("replicated-heads", 8, 4, "'shard-over-heads': the model's 8 KV heads are a multiple of tp_degree"),
    ],
)
def test_strategies_that_the_model_decides(
    strategy: str | None, num_key_value_heads: int, tp_degree: int, accepted: str | None
) -> None:
    violation = validate_head_sharding(
        {"group_query_attention": strategy}, num_key_value_heads=num_key_value_heads, tp_degree=tp_degree
    )
    if accepted is None:
        assert violation is None
    else:
        assert violation is not None
        assert violation.field == "transformers_neuronx.group_query_attention"
        assert violation.accepted.startswith(accepted)


class TestOptionsOfTheCode:
    """Those that the guide does not name: each becomes an attribute, is a hint, or is refused with what is served."""

    @pytest.mark.parametrize(
        ("name", "value", "attribute"),
        [("all_reduce_dtype", "bfloat16", "rpl_reduce_dtype"), ("padding_side", "left", "padding_side")],
    )
    def test_becomes_an_attribute(self, name: str, value: str, attribute: str) -> None:
        config = resolve_config({SECTION: {name: value}}, checkpoint_dtype=None).config.neuron_config
        assert getattr(config, attribute) == value
        with pytest.raises(ConfigInvalid) as caught:
            resolve_config({SECTION: {name: "int8"}}, checkpoint_dtype=None)
        assert [one.field for one in caught.value.violations] == [f"{SECTION}.{name}"]

    @pytest.mark.parametrize("option", [one for one in CODE_OPTIONS if one.hint], ids=lambda one: one.name)
    def test_is_a_hint(self, option: CodeOption) -> None:
        value = option.domain.words[0] if isinstance(option.domain, Choice) else isinstance(option.domain, Flag) or 1
        resolution = resolve_config({SECTION: {option.name: value}}, checkpoint_dtype=None)
        (hint,) = resolution.hints
        assert (hint.field, hint.value, hint.reason) == (f"{SECTION}.{option.name}", value, option.hint)
        assert str(hint) in resolution.warnings
        assert resolution.config == resolve_config({}, checkpoint_dtype=None).config

    @pytest.mark.parametrize(
        ("name", "value", "served"),
        [
            ("cast_logits_dtype", "bfloat16", "'float32'"),
            ("bf16_rms_norm", True, "False"),
            ("output_all_logits", True, "False"),
            ("return_all_logits", True, "False"),
            ("log_softmax_scores", True, "False"),
            ("is_eagle_target", True, "False"),
            ("is_eagle_draft", True, "False"),
            ("has_pre_attention_norm", False, "True"),
            ("continuous_batching", {"batch_size_for_shared_caches": 4}, "unset"),
            ("sparse_attn", {"block_size": 4}, "unset"),
        ],
    )
    def test_is_refused(self, name: str, value: Any, served: str) -> None:
        with pytest.raises(FeatureNotServed) as caught:
            resolve_config({SECTION: {name: value}}, checkpoint_dtype=None)
        (violation,) = caught.value.violations
        assert violation.field == f"{SECTION}.{name}"
        assert violation.accepted.startswith(f"{served}: ")
        option = next(one for one in CODE_OPTIONS if one.name == name)
        assert resolve_config({SECTION: {name: option.only}}, checkpoint_dtype=None).warnings == ()

    def test_every_option_has_one_outcome(self) -> None:
        for option in CODE_OPTIONS:
            assert [bool(one) for one in (option.becomes, option.hint, option.refused)].count(True) == 1, option.name

    def test_a_hint_of_a_draft_model_names_its_place(self) -> None:
        draft = {"draft_model_path": "d", "draft_config": {SECTION: {"unroll": 4}}}
        speculation = {"enable_fused_speculation": True, "speculation_length": 4, "on_device_sampling_config": {}}
        document = {"fused_spec_config": draft, "neuron_config": speculation}
        resolution = resolve_config(document, checkpoint_dtype=None, target="trn2")
        assert "fused_spec_config.draft_config.transformers_neuronx.unroll" in [hint.field for hint in resolution.hints]
