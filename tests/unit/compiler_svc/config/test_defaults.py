"""Defaults, derived values and normalized spellings."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bundle.errors import FieldViolation
from compiler_svc.config import MoENeuronConfig, Resolution, TargetKind, read_config, resolve_config
from compiler_svc.errors import ConfigInvalid, FeatureNotServed
from tests.unit.compiler_svc.config.resolving import mistakes_in, resolve

SPECULATES: dict[str, Any] = {
    "enable_fused_speculation": True,
    "speculation_length": 4,
    "on_device_sampling_config": {},
}
QUANTIZED_MLP = {"mlp_kernel_enabled": True, "quantized_mlp_kernel_enabled": True}


def test_defaults_raise_no_warning() -> None:
    resolution = resolve_config({}, checkpoint_dtype=None)
    assert (resolution.warnings, resolution.hints) == ((), ())
    config = resolution.config.neuron_config
    assert not isinstance(config, MoENeuronConfig)
    assert (config.on_device_sampling_config, config.lora_config, config.prefix_buckets) == (None, None, ())
    assert config.context_encoding_buckets == config.token_generation_buckets == (128,)


def test_tables_inside_derive_their_defaults_from_the_table_around_them() -> None:
    """Defaults that are plain values stand in the API's comments, and `test_documented_attributes` compares them."""
    nested: dict[str, Any] = {"on_device_sampling_config": {}, "routed_experts_mlp_ops_config": {}}
    config: Any = resolve(target="trn2", glu_mlp=False, **nested).config.neuron_config
    assert config.on_device_sampling_config.is_greedy
    assert not config.routed_experts_mlp_ops_config.glu_mlp
    assert config.blockwise_matmul_config.logical_nc_config == 2


@pytest.mark.parametrize(("target", "cores"), [("cpu", 1), ("inf2", 1), ("trn1", 1), ("trn2", 2), ("trn3", 2)])
def test_logical_cores_are_the_targets(target: TargetKind, cores: int) -> None:
    config = resolve(target=target).config.neuron_config
    assert config.logical_nc_config == config.logical_neuron_cores == cores


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ({"seq_len": 256}, {"max_context_length": 256, "max_length": 256, "n_positions": 256, "max_new_tokens": None}),
        ({"seq_len": 256, "max_context_length": 192}, {"max_new_tokens": 64, "context_encoding_buckets": (192,)}),
        ({"seq_len": 64, "max_length": 96}, {"token_generation_buckets": (96,), "longest_sequence": 64}),
        ({"batch_size": 4}, {"max_batch_size": 4, "ctx_batch_size": 4, "tkg_batch_size": 4, "pa_num_blocks": 4}),
        ({"batch_size": 4, "ctx_batch_size": 1}, {"max_batch_size": 4, "ctx_batch_size": 1, "tkg_batch_size": 4}),
        ({"max_batch_size": 4, "tkg_batch_size": 4}, {"batch_size": 1, "ctx_batch_size": 1, "max_batch_size": 4}),
        (
            {"seq_len": 1000, "enable_bucketing": True, "max_context_length": 181},
            {"context_encoding_buckets": (181,), "token_generation_buckets": (128, 256, 512, 1000)},
        ),
        (
            {"seq_len": 256, "enable_bucketing": True, "context_encoding_buckets": [16, 64]},
            {"context_encoding_buckets": (16, 64), "token_generation_buckets": (128, 256)},
        ),
        ({"torch_dtype": "torch.float32"}, {"torch_dtype": "float32"}),
        # "set is_continuous_batching to True, and set tkg_batch_size to the max batch size"
        ({"is_continuous_batching": True, "tkg_batch_size": 8, "ctx_batch_size": 1}, {"max_batch_size": 8}),
        ({}, {"quantization_type": "per_tensor_symmetric", "quantization_dtype": "int8"}),
        (QUANTIZED_MLP, {"quantization_type": "per_channel_symmetric", "quantization_dtype": "f8e4m3"}),
        ({}, {"enable_fused_speculation": False, "trace_tokengen_model": True}),
        ({"speculation_length": 4}, {"enable_fused_speculation": False, "trace_tokengen_model": False}),
        (
            {"is_eagle_draft": True, "enable_eagle_speculation": True, "speculation_length": 4},
            {"enable_fused_speculation": False, "trace_tokengen_model": False},
        ),
    ],
)
def test_derived_values(given_values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = resolve(target="trn2", **given_values).config.neuron_config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("in_chunks", "given_values", "expected"),
    [
        (False, {"context_encoding_buckets": [16, 64]}, 64),
        (True, {"context_encoding_buckets": [16, 64]}, 200),
        (True, {"context_encoding_buckets": [16, 64], "token_generation_buckets": [128]}, 128),
        (True, {"context_encoding_buckets": [16, 64], "n_active_tokens": 90}, 90),
        (False, {"context_encoding_buckets": [16, 200]}, 200),
    ],
)
def test_prompts_in_chunks_may_be_longer_than_buckets(
    in_chunks: bool, given_values: dict[str, Any], expected: int
) -> None:
    config = resolve(seq_len=256, max_context_length=200, enable_bucketing=True, **given_values).config.neuron_config
    assert config.find_longest_prompt(in_chunks=in_chunks) == expected


def test_unset_and_null_take_the_default_and_zero_does_not() -> None:
    assert resolve(max_new_tokens=None, seq_len=None).config == resolve().config
    assert mistakes_in(max_new_tokens=0)["max_new_tokens"].value == "0"
    assert mistakes_in(batch_size=0)["batch_size"].accepted == (
        "an integer from 1 to 2147483647 (NxD Inference API guide, General configuration)"
    )


def test_minus_one_is_no_top_k_limit() -> None:
    config: Any = resolve(on_device_sampling_config={"top_k": -1}).config.neuron_config
    assert config.on_device_sampling_config.top_k == 0


@pytest.mark.parametrize("limit", [float("inf"), float("-inf"), "Infinity", "-Infinity"])
def test_an_infinite_limit_is_none(limit: object) -> None:
    config: Any = resolve(gate_clamp_upper_limit=limit, quantize_clamp_bound=limit).config.neuron_config
    assert config.gate_clamp_upper_limit is None


class TestDtype:
    def test_the_checkpoint_decides_where_the_configuration_does_not(self) -> None:
        assert resolve("float32").config.neuron_config.torch_dtype == "float32"
        assert resolve("float32", torch_dtype="bfloat16").config.neuron_config.torch_dtype == "bfloat16"
        assert resolve(None).config.neuron_config.torch_dtype == "bfloat16"

    @pytest.mark.parametrize("target", ["cpu", "trn2"])
    def test_a_checkpoint_in_a_dtype_that_is_none_needs_an_explicit_one(self, target: TargetKind) -> None:
        with pytest.raises(FeatureNotServed) as caught:
            resolve("float64", target)
        (violation,) = caught.value.violations
        assert violation.field == "neuron_config.torch_dtype"
        assert violation.value == "'float64' from the checkpoint"
        assert resolve("float64", target, torch_dtype="float32").config.neuron_config.torch_dtype == "float32"

    @pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float64"])
    @pytest.mark.parametrize(
        "neuron_config",
        [
            {"qkv_kernel_enabled": True, "fused_qkv": True},
            {"attention_dtype": "float32"},
            {"attention_dtype": "float32", "torch_dtype": "bfloat16", "cast_type": "as-declared"},
            SPECULATES | {"torch_dtype": "float32"},
            SPECULATES,
        ],
        ids=lambda neuron_config: "-".join(neuron_config)[:40],
    )
    @pytest.mark.parametrize("draft", [{}, {"torch_dtype": "float32"}], ids=["draft", "draft-in-float32"])
    def test_the_checkpoint_may_be_opened_later(
        self, neuron_config: dict[str, Any], draft: dict[str, Any], dtype: str | None
    ) -> None:
        document: dict[str, Any] = {"neuron_config": neuron_config}
        if "speculation_length" in neuron_config:
            document["fused_spec_config"] = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft}}
        read = read_config(document, target="trn2", compiles=False)
        at_once = find_outcome(lambda: resolve_config(document, checkpoint_dtype=dtype, target="trn2"))
        assert find_outcome(lambda: read.resolve(dtype)) == at_once


def find_outcome(resolve: Callable[[], Resolution]) -> Resolution | Sequence[FieldViolation]:
    try:
        return resolve()
    except (ConfigInvalid, FeatureNotServed) as error:
        return error.violations
