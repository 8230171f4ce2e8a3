"""Transformers NeuronX's names."""

from typing import Any

import pytest

from compiler_svc.config import Resolution, resolve_config
from compiler_svc.config.tables.transformers_neuronx import OPTIONS, Option
from compiler_svc.config.transformers_neuronx import SECTION, translate_transformers_neuronx, validate_head_sharding
from compiler_svc.errors import ConfigInvalid, FeatureNotServed

S8, F8 = {"quant_dtype": "s8"}, {"quant_dtype": "f8e4m3fn"}
TWO_LENGTHS = {"n_positions": 128, "on_device_generation": {"max_length": 64}}
INT8 = {"quantized": True, "quantization_dtype": "int8"}
SAMPLED = {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 2.0}
GENERATED = "enable_bucketing", "seq_len", "token_generation_buckets", "context_encoding_buckets"

#: What sections become.
TRANSLATIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (
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
        },
        {
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
        },
    ),
    *(
        ({"n_positions": given}, dict(zip(GENERATED, (True, *generated), strict=True)))
        for given, *generated in (
            (1024, 1024, [128, 256, 512, 1024], [64, 128, 256, 512]),
            ([1024], 1024, [128, 256, 512, 1024], [64, 128, 256, 512]),
            (1500, 1500, [128, 256, 512, 1024, 1500], [64, 128, 256, 512, 750]),
            (181, 181, [128, 181], [64, 90]),
            (128, 128, [128], [64]),
            (100, 100, [100], [50]),
            (1, 1, [1], [1]),
            ([300, 301], 301, [300, 301], [150]),
            ([1, 2, 3], 3, [1, 2, 3], [1]),
        )
    ),
    ({"n_positions": 128, "context_length_estimate": 64}, dict(zip(GENERATED, (True, 128, [128], [64]), strict=True))),
    ({"context_length_estimate": 64}, {"enable_bucketing": True, "context_encoding_buckets": [64]}),
    ({"amp": "f32"}, {"torch_dtype": "float32"}),
    ({"amp": "f16"}, {"torch_dtype": "float16"}),
    ({"amp": "bf16"}, {"torch_dtype": "bfloat16"}),
    *(
        ({"on_device_generation": generation}, {"on_device_sampling_config": sampling})
        for generation, sampling in (
            ({}, {}),
            ({"do_sample": False}, {"do_sample": False}),
            ({"do_sample": True}, {"do_sample": True, "top_k": 50}),
            ({"dynamic": True, "global_top_k": 64}, {"dynamic": True, "global_topk": 64, "top_k": 50}),
            (SAMPLED | {"deterministic": True, "top_p_min_tokens": 1}, SAMPLED | {"deterministic": True}),
            (SAMPLED | {"dynamic": None}, SAMPLED),
        )
    ),
    ({"on_device_generation": {"max_length": 256}}, {"on_device_sampling_config": {}, "seq_len": 256}),
    ({"quant": S8 | {"dequant_dtype": "bf16"}}, INT8 | {"torch_dtype": "bfloat16"}),
    ({"quant": S8 | {"quantize_method": "vector_dynamic"}}, INT8 | {"quantization_type": "per_channel_symmetric"}),
    ({"quant": S8 | {"quantize_attn": True}}, INT8),
    (
        {"quant": S8 | {"quantize_attn": False, "no_quantize_list": []}},
        INT8 | {"modules_to_not_convert": ["self_attn"]},
    ),
    ({"kv_cache_quant": F8 | {"quantize_method": "direct_cast"}}, {"kv_cache_quant": True}),
    ({"kv_cache_quant": F8 | {"dequant_dtype": "bf16"}}, {"kv_cache_quant": True, "torch_dtype": "bfloat16"}),
    (
        dict.fromkeys(("batch_size", "n_positions", "context_length_estimate", "amp", "on_device_generation", "quant")),
        {},
    ),
)


@pytest.mark.parametrize(("section", "values"), TRANSLATIONS)
def test_what_a_section_becomes(section: dict[str, Any], values: dict[str, Any]) -> None:
    translation = translate_transformers_neuronx(section)
    assert translation.violations == translation.unserved == []
    assert translation.values == values
    assert translation.paths.keys() >= values.keys()


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("neuron_config.ctx_batch_size", "prompt_batch_size"),
        ("neuron_config.modules_to_not_convert", "quant.quantize_attn"),
        ("neuron_config.seq_len", "n_positions"),
        ("neuron_config.on_device_sampling_config", "on_device_generation"),
        ("neuron_config.on_device_sampling_config.top_p", "on_device_generation.top_p"),
        ("neuron_config.on_device_sampling_config.global_topk", "on_device_generation.global_top_k"),
    ],
)
def test_a_mistake_is_named_where_it_was_made(path: str, where: str) -> None:
    section = {"prompt_batch_size": 0, "n_positions": 128, "on_device_generation": {"global_top_k": -1}}
    section["quant"] = {"quantize_attn": False}
    translation = translate_transformers_neuronx(section)
    assert translation.locate(path) == f"transformers_neuronx.{where}"
    assert translation.locate("neuron_config.batch_size") == "neuron_config.batch_size"
    assert translation.locate("seq_len") == "seq_len"


class TestExamplesOfTheGuide:
    """Its examples leave `n_positions` unset, and quantize without a quantized checkpoint."""

    def resolve(self, section: dict[str, Any], **neuron_config: Any) -> Resolution:
        document = {"transformers_neuronx": section, "neuron_config": neuron_config}
        return resolve_config(document, checkpoint_dtype="float32", target="trn2")

    def test_prompts_alone_have_lengths(self) -> None:
        resolution = self.resolve({"prompt_batch_size": 1, "batch_size": 5, "context_length_estimate": 256})
        config = resolution.config.neuron_config
        assert (config.seq_len, config.ctx_batch_size, config.max_batch_size) == (512, 1, 5)
        assert (config.context_encoding_buckets, config.token_generation_buckets) == ((256,), (128, 256, 512))
        assert resolution.warnings[0].startswith("transformers_neuronx.n_positions: unset, so sequences get 512 tokens")

    def test_a_length_of_sequences_that_is_given_counts(self) -> None:
        assert self.resolve({"context_length_estimate": 256}, seq_len=300).config.neuron_config.seq_len == 300
        section = {"context_length_estimate": 256, "on_device_generation": {"max_length": 260}}
        assert self.resolve(section).config.neuron_config.seq_len == 260

    def test_quantized_weights_need_no_path(self) -> None:
        config = self.resolve({"quant": S8}).config.neuron_config
        assert (config.quantized, config.quantization_dtype, config.quantized_checkpoints_path) == (True, "int8", None)


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
            {"quant": S8 | {"no_quantize_list": ["model.1"]}},
            "quant.no_quantize_list",
            "[]: neuron_config.modules_to_not",
        ),
        ({"kv_cache_quant": S8}, "kv_cache_quant.quant_dtype", "'f8e4m3fn': the KV cache"),
        ({"group_query_attention": "shard-over-batch"}, "group_query_attention", "'shard-over-heads', 'replicated-h"),
        ({"group_query_attention": "all-gather-heads"}, "group_query_attention", "'shard-over-heads', 'replicated-h"),
        # The library's default.
        ({"kv_cache_quant": {}}, "kv_cache_quant.quant_dtype", "'f8e4m3fn': the KV cache"),
    ],
)
def test_what_is_not_served(section: dict[str, Any], path: str, served: str) -> None:
    translation = translate_transformers_neuronx(section)
    assert translation.violations == []
    (violation,) = translation.unserved
    assert violation.field == f"{SECTION}.{path}"
    assert violation.accepted.startswith(served)


@pytest.mark.parametrize("option", [one for row in OPTIONS for one in (row, *row.inside)], ids=lambda one: one.name)
def test_every_option_has_one_outcome(option: Option) -> None:
    assert [bool(one) for one in (option.becomes, option.hint, option.serves)].count(True) == 1
    assert option.means is None or option.becomes


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
        (TWO_LENGTHS, "on_device_generation.max_length", "the longest of n_positions, which is 128"),
        ({"on_device_generation": {"zebra": 3}}, "on_device_generation.zebra", "max_length, deterministic, top_p_min"),
        ({"on_device_generation": {"deterministic": 1}}, "on_device_generation.deterministic", "true or false"),
        (
            {"on_device_generation": {"top_p_min_tokens": 0}},
            "on_device_generation.top_p_min_tokens",
            "an integer from 1",
        ),
        ({"quant": "s8"}, "quant", "an object"),
        (
            {"quant": S8 | {"zebra": 3}},
            "quant.zebra",
            "one of quant_dtype, dequant_dtype, quantize_method, quantize_attn",
        ),
        ({"quant": S8 | {"quantize_method": "direct_cast"}}, "quant.quantize_method", "'vector_dynamic'"),
        ({"kv_cache_quant": True}, "kv_cache_quant", "an object"),
        (
            {"kv_cache_quant": F8 | {"zebra": 3}},
            "kv_cache_quant.zebra",
            "one of quant_dtype, quantize_method, dequant_",
        ),
        ({"kv_cache_quant": {"quant_dtype": "f8e5m2"}}, "kv_cache_quant.quant_dtype", "'s8', 'f16', 'bf16'"),
        (
            {"quant": S8 | {"dequant_dtype": "f16"}, "kv_cache_quant": {"dequant_dtype": "bf16"}},
            "kv_cache_quant.dequant_dtype",
            "quant.dequant_dtype, which is 'f16'",
        ),
        ({"quant": {"quant_dtype": "s4"}}, "quant.quant_dtype", "'s8' (Transformers NeuronX developer guide"),
        ({"quant": S8 | {"dequant_dtype": "s8"}}, "quant.dequant_dtype", "'f32', 'f16', 'bf16'"),
        ({"amp": "bf16", "quant": S8 | {"dequant_dtype": "f16"}}, "quant.dequant_dtype", "amp, which is 'bf16'"),
    ],
)
def test_a_mistake(section: dict[str, Any], path: str, accepted: str) -> None:
    violations = translate_transformers_neuronx(section).violations
    assert violations[0].field == f"transformers_neuronx.{path}"
    assert accepted in violations[0].accepted


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
    assert (violation is None) == (accepted is None)
    if violation is not None:
        assert violation.field == "transformers_neuronx.group_query_attention"
        assert violation.accepted.startswith(str(accepted))


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

    @pytest.mark.parametrize("option", [one for one in OPTIONS if one.hint], ids=lambda one: one.name)
    def test_is_a_hint(self, option: Option) -> None:
        assert option.domain is not None
        value = option.domain.words[0] if option.domain.words else option.domain.accepts(True) or 1
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
        (only,) = next(one.serves for one in OPTIONS if one.name == name)
        assert resolve_config({SECTION: {name: only}}, checkpoint_dtype=None).warnings == ()

    def test_a_hint_of_a_draft_model_names_its_place(self) -> None:
        draft = {"draft_model_path": "d", "draft_config": {SECTION: {"unroll": 4}}}
        speculation = {"enable_fused_speculation": True, "speculation_length": 4, "on_device_sampling_config": {}}
        document = {"fused_spec_config": draft, "neuron_config": speculation}
        resolution = resolve_config(document, checkpoint_dtype=None, target="trn2")
        assert "fused_spec_config.draft_config.transformers_neuronx.unroll" in [hint.field for hint in resolution.hints]
