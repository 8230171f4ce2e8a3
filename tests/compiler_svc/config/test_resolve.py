import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kiln.config.v1 import config_pb2

from bundle.digest import canonical_json
from bundle.errors import FieldViolation
from compiler_svc.config import InferenceConfig, Resolution, parse_document, resolve_config
from compiler_svc.config.attributes import (
    FOREIGN_TO_NEURON_CONFIG,
    NEURON_CONFIG,
    ON_DEVICE_SAMPLING_CONFIG,
)
from compiler_svc.errors import ConfigInvalid, FeatureNotServed


def resolve(checkpoint_dtype: str | None = None, **neuron_config: Any) -> Resolution:
    return resolve_config({"neuron_config": neuron_config}, checkpoint_dtype=checkpoint_dtype)


def mistakes_in(**neuron_config: Any) -> dict[str, FieldViolation]:
    with pytest.raises(ConfigInvalid) as caught:
        resolve(**neuron_config)
    assert caught.value.reason == "CONFIG_INVALID"
    return {violation.field.removeprefix("neuron_config."): violation for violation in caught.value.violations}


def test_every_default() -> None:
    resolution = resolve_config({}, checkpoint_dtype=None)
    assert resolution.warnings == ()
    assert resolution.config.to_json() == {
        "neuron_config": {
            "batch_size": 1,
            "padding_side": "right",
            "seq_len": 128,
            "max_context_length": 128,
            "max_new_tokens": None,
            "max_length": 128,
            "n_active_tokens": 128,
            "n_positions": 128,
            "torch_dtype": "bfloat16",
            "rpl_reduce_dtype": None,
            "cast_type": "config",
            "async_mode": False,
            "save_sharded_checkpoint": True,
            "skip_sharding": False,
            "logical_nc_config": 1,
            "skip_warmup": False,
            "tp_degree": 1,
            "fused_qkv": False,
            "on_device_sampling_config": None,
            "output_logits": False,
            "enable_bucketing": False,
            "context_encoding_buckets": [128],
            "token_generation_buckets": [128],
            "is_continuous_batching": False,
            "max_batch_size": 1,
            "ctx_batch_size": 1,
            "tkg_batch_size": 1,
        }
    }


def test_sampling_defaults() -> None:
    sampling = resolve(on_device_sampling_config={}).config.neuron_config.on_device_sampling_config
    assert sampling is not None
    assert (sampling.do_sample, sampling.top_k, sampling.top_p, sampling.temperature) == (False, 1, 1.0, 1.0)
    assert (sampling.dynamic, sampling.deterministic, sampling.global_topk) == (False, False, 256)
    assert sampling.is_greedy


def test_table_and_message_and_dataclass_have_the_same_names() -> None:
    message = [field.name for field in config_pb2.NeuronConfig.DESCRIPTOR.fields]
    assert sorted(message) == sorted(attribute.name for attribute in NEURON_CONFIG)
    sampling = [field.name for field in config_pb2.OnDeviceSamplingConfig.DESCRIPTOR.fields]
    assert sorted(sampling) == sorted(attribute.name for attribute in ON_DEVICE_SAMPLING_CONFIG)
    assert set(resolve_config({}, checkpoint_dtype=None).config.to_json()["neuron_config"]) == set(message)


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ({"seq_len": 256}, {"max_context_length": 256, "max_length": 256, "n_positions": 256, "max_new_tokens": None}),
        ({"seq_len": 256, "max_context_length": 192}, {"max_new_tokens": 64, "context_encoding_buckets": (192,)}),
        ({"seq_len": 64, "max_length": 96}, {"token_generation_buckets": (96,), "longest_sequence": 64}),
        ({"batch_size": 4}, {"max_batch_size": 4, "ctx_batch_size": 4, "tkg_batch_size": 4}),
        ({"batch_size": 4, "ctx_batch_size": 1}, {"max_batch_size": 4, "ctx_batch_size": 1, "tkg_batch_size": 4}),
        ({"max_batch_size": 4, "tkg_batch_size": 4}, {"batch_size": 1, "ctx_batch_size": 1, "max_batch_size": 4}),
        (
            {"seq_len": 1000, "enable_bucketing": True, "max_context_length": 181},
            {"context_encoding_buckets": (181,), "token_generation_buckets": (128, 256, 512, 1000)},
        ),
        (
            {"seq_len": 256, "enable_bucketing": True, "context_encoding_buckets": [16, 64]},
            {"context_encoding_buckets": (16, 64), "longest_prompt": 64, "token_generation_buckets": (128, 256)},
        ),
        ({"torch_dtype": "torch.float32"}, {"torch_dtype": "float32"}),
    ],
)
def test_derived_values(given_values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = resolve(**given_values).config.neuron_config
    assert {name: getattr(config, name) for name in expected} == expected


def test_unset_and_null_take_the_default_and_zero_does_not() -> None:
    assert resolve(max_new_tokens=None, seq_len=None).config == resolve().config
    assert mistakes_in(max_new_tokens=0)["max_new_tokens"].value == "0"
    assert mistakes_in(batch_size=0)["batch_size"].accepted == "an integer from 1 to 2147483647"


def test_minus_one_is_no_top_k_limit() -> None:
    sampling = resolve(on_device_sampling_config={"top_k": -1}).config.neuron_config.on_device_sampling_config
    assert sampling is not None
    assert sampling.top_k == 0


class TestDtype:
    def test_the_checkpoint_decides_where_the_configuration_does_not(self) -> None:
        assert resolve("float32").config.neuron_config.torch_dtype == "float32"
        assert resolve("float32", torch_dtype="bfloat16").config.neuron_config.torch_dtype == "bfloat16"
        assert resolve(None).config.neuron_config.torch_dtype == "bfloat16"

    def test_a_checkpoint_in_float16_needs_an_explicit_dtype(self) -> None:
        with pytest.raises(FeatureNotServed) as caught:
            resolve("float16")
        (violation,) = caught.value.violations
        assert violation.field == "neuron_config.torch_dtype"
        assert violation.value == "'float16' from the checkpoint"
        assert resolve("float16", torch_dtype="float32").config.neuron_config.torch_dtype == "float32"


class TestMistakes:
    def test_all_are_reported_at_once(self) -> None:
        found = mistakes_in(
            batch_size="4",
            seq_len=True,
            max_length=8.0,
            seq_length=3,
            padding_side="up",
            enable_bucketing=1,
            context_encoding_buckets=[128, 64],
            on_device_sampling_config={"top_p": 0, "temperature": math.nan, "globaltopk": 2},
            torch_dtype="float16",
        )
        assert set(found) == {
            "batch_size",
            "seq_len",
            "max_length",
            "seq_length",
            "padding_side",
            "enable_bucketing",
            "context_encoding_buckets",
            "on_device_sampling_config.top_p",
            "on_device_sampling_config.temperature",
            "on_device_sampling_config.globaltopk",
            "torch_dtype",
        }
        assert found["batch_size"].value == "'4'"
        assert found["seq_length"].accepted == "did you mean 'seq_len'?"
        assert found["on_device_sampling_config.globaltopk"].accepted == "did you mean 'global_topk'?"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("seq_len", -1),
            ("seq_len", 2**31),
            ("seq_len", "128"),
            ("seq_len", 128.0),
            ("seq_len", [128]),
            ("torch_dtype", "float64"),
            ("torch_dtype", 32),
            ("rpl_reduce_dtype", "int8"),
            ("cast_type", "declared"),
            ("async_mode", "yes"),
            ("logical_nc_config", 3),
            ("tp_degree", 0),
            ("on_device_sampling_config", True),
            ("context_encoding_buckets", 64),
            ("context_encoding_buckets", [64, 64]),
            ("token_generation_buckets", [0, 64]),
            ("token_generation_buckets", [64, "128"]),
            ("cc_pipeline_tiling_factor", 0),
        ],
    )
    def test_each_names_field_value_and_what_is_accepted(self, name: str, value: Any) -> None:
        found = mistakes_in(**{name: value})
        assert set(found) == {name}
        assert found[name].value == repr(value)
        assert found[name].accepted

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("top_k", -2),
            ("top_k", 257),
            ("top_p", 1.5),
            ("top_p", "0.9"),
            ("temperature", -1),
            ("temperature", math.inf),
            ("temperature", 10**400),
            ("do_sample", 0),
            ("global_topk", -1),
        ],
    )
    def test_sampling(self, name: str, value: Any) -> None:
        assert set(mistakes_in(on_device_sampling_config={name: value})) == {f"on_device_sampling_config.{name}"}

    @pytest.mark.parametrize(
        ("values", "field", "accepted"),
        [
            ({"seq_len": 64, "max_context_length": 65}, "max_context_length", "at most seq_len, which is 64"),
            ({"seq_len": 64, "max_length": 63}, "max_length", "at least seq_len, which is 64"),
            ({"max_new_tokens": 129}, "max_new_tokens", "at most seq_len, which is 128"),
            (
                {"enable_bucketing": True, "context_encoding_buckets": [64, 256]},
                "context_encoding_buckets",
                "a list whose last bucket is at most max_context_length, which is 128",
            ),
            (
                {"enable_bucketing": True, "token_generation_buckets": [256]},
                "token_generation_buckets",
                "a list whose last bucket is at most max_length, which is 128",
            ),
            ({"ctx_batch_size": 2}, "ctx_batch_size", "at most max_batch_size, which is 1"),
            ({"max_batch_size": 4}, "tkg_batch_size", "max_batch_size, which is 4"),
            ({"batch_size": 4, "tkg_batch_size": 2}, "tkg_batch_size", "max_batch_size, which is 4"),
        ],
    )
    def test_between_attributes(self, values: dict[str, Any], field: str, accepted: str) -> None:
        found = mistakes_in(**values)
        assert set(found) == {field}
        assert found[field].accepted.startswith(accepted)

    def test_a_rule_is_silent_where_an_attribute_that_it_reads_is_mistaken_already(self) -> None:
        assert set(mistakes_in(seq_len="64", max_context_length=65, max_length=32)) == {"seq_len"}

    def test_a_name_on_the_wrong_level_is_told_its_place(self) -> None:
        with pytest.raises(ConfigInvalid) as caught:
            resolve_config({"seq_len": 64, "rope_theta": 1e4}, checkpoint_dtype=None)
        by_field = {violation.field: violation.accepted for violation in caught.value.violations}
        assert by_field["seq_len"].endswith("did you mean neuron_config.seq_len?")
        assert "checkpoint's config.json" in by_field["rope_theta"]
        found = mistakes_in(temperature=0.5)
        assert found["temperature"].accepted.endswith("neuron_config.on_device_sampling_config.temperature?")

    def test_thousands_of_names_are_refused_without_searching(self) -> None:
        found = mistakes_in(**{f"name{number}": 1 for number in range(5000)})
        assert found["neuron_config"].value == "5000 names"

    def test_the_status_stays_small(self) -> None:
        with pytest.raises(ConfigInvalid) as caught:
            resolve(**{f"unknown_{number}" + "x" * 60: "y" * 1000 for number in range(200)})
        assert len(str(caught.value)) < 2000
        assert sum(len(str(violation)) for violation in caught.value.violations) < 6000


class TestNotServed:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("rpl_reduce_dtype", "float16"),
            ("torch_dtype", "float16"),
            ("padding_side", "left"),
            ("cast_type", "as-declared"),
            ("async_mode", True),
            ("fused_qkv", True),
            ("quantized", True),
            ("kv_cache_quant", True),
            ("speculation_length", 4),
            ("is_medusa", True),
            ("lora_config", {"max_loras": 2}),
            ("is_prefix_caching", True),
            ("is_block_kv_layout", True),
            ("flash_decoding_enabled", True),
        ],
    )
    def test_each_is_named(self, name: str, value: Any) -> None:
        with pytest.raises(FeatureNotServed) as caught:
            resolve(**{name: value})
        (violation,) = caught.value.violations
        assert violation.field == f"neuron_config.{name}"
        assert violation.accepted.endswith("all that this version serves")
        assert caught.value.metadata["features"] == f"neuron_config.{name}"

    def test_all_are_reported_at_once(self) -> None:
        with pytest.raises(FeatureNotServed) as caught:
            resolve(padding_side="left", fused_qkv=True, quantized=True)
        assert len(caught.value.violations) == 3

    @pytest.mark.parametrize("tp_degree", [1, 2, 3, 64])
    def test_every_degree_is_served(self, tp_degree: int) -> None:
        """What a model can be cut into is judged when the model is known."""
        resolution = resolve(tp_degree=tp_degree, rpl_reduce_dtype="bfloat16")
        assert resolution.config.neuron_config.tp_degree == tp_degree
        assert any("rpl_reduce_dtype" in warning for warning in resolution.warnings) == (tp_degree == 1)

    @pytest.mark.parametrize("weights", [{"save_sharded_checkpoint": False}, {"skip_sharding": True}])
    def test_bundles_without_weights_are_served(self, weights: dict[str, bool]) -> None:
        resolution = resolve(**weights)
        (name,) = weights
        assert getattr(resolution.config.neuron_config, name) == weights[name]
        assert not resolution.warnings

    def test_the_default_is_served(self) -> None:
        defaults = {attribute.name: attribute.default for attribute in FOREIGN_TO_NEURON_CONFIG}
        resolution = resolve(**defaults)
        assert resolution.config == resolve().config
        assert resolution.warnings == ()

    def test_false_is_not_zero(self) -> None:
        with pytest.raises(FeatureNotServed):
            resolve(quantized=0)


class TestWarnings:
    @pytest.mark.parametrize(
        ("values", "beginning"),
        [
            ({"n_positions": 64}, "neuron_config.n_positions: 64 is ignored"),
            ({"logical_nc_config": 2}, "neuron_config.logical_nc_config: 2 is ignored"),
            ({"rpl_reduce_dtype": "float32"}, "neuron_config.rpl_reduce_dtype: 'float32' is ignored"),
            ({"skip_warmup": True}, "neuron_config.skip_warmup: True is ignored"),
            ({"attn_kernel_enabled": True}, "neuron_config.attn_kernel_enabled: True is ignored"),
            ({"context_encoding_buckets": [64]}, "neuron_config: bucket lists are ignored"),
            (
                {"enable_bucketing": True, "context_encoding_buckets": [64]},
                "neuron_config.context_encoding_buckets: prompts longer than the last bucket are refused",
            ),
            (
                {"enable_bucketing": True, "token_generation_buckets": [64]},
                "neuron_config.token_generation_buckets: sequences end at the last bucket",
            ),
            ({"max_length": 256}, "neuron_config.max_length: KV positions beyond seq_len, which is 128,"),
            ({"batch_size": 2}, "neuron_config.is_continuous_batching: the runtime lets requests join"),
            ({"output_logits": True}, "neuron_config.output_logits: logits are the output anyway"),
            (
                {"on_device_sampling_config": {"top_k": 5}},
                "neuron_config.on_device_sampling_config: top_k, top_p and temperature are ignored",
            ),
        ],
    )
    def test_what_does_not_count_is_said(self, values: dict[str, Any], beginning: str) -> None:
        (warning,) = resolve(**values).warnings
        assert warning.startswith(beginning)

    def test_a_plain_configuration_has_none(self) -> None:
        sampling = {"dynamic": True, "global_topk": 64, "top_k": 5}
        resolution = resolve(
            seq_len=256,
            batch_size=4,
            is_continuous_batching=True,
            output_logits=True,
            on_device_sampling_config=sampling,
        )
        assert resolution.warnings == ()


class TestDocument:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "seq_len: 3",
            "[]",
            "null",
            '"neuron_config"',
            '{"neuron_config": {"seq_len": NaN}}',
            '{"neuron_config": {"seq_len": 1, "seq_len": 2}}',
            '{"neuron_config": {"seq_len": ' + "9" * 5000 + "}}",
            "[" * 100_000,
            '{"a":' * 100_000,
        ],
    )
    def test_what_is_no_object_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigInvalid) as caught:
            parse_document(text)
        assert caught.value.violations[0].field == "config_json"

    def test_an_overflowing_number_is_a_mistake_of_its_attribute(self) -> None:
        document = parse_document('{"neuron_config": {"on_device_sampling_config": {"temperature": 1e999}}}')
        with pytest.raises(ConfigInvalid, match="temperature"):
            resolve_config(document, checkpoint_dtype=None)

    @pytest.mark.parametrize("value", [[], "x", 3, True])
    def test_neuron_config_is_an_object(self, value: Any) -> None:
        with pytest.raises(ConfigInvalid, match="neuron_config"):
            resolve_config({"neuron_config": value}, checkpoint_dtype=None)


NAMES = st.sampled_from([attribute.name for attribute in (*NEURON_CONFIG, *FOREIGN_TO_NEURON_CONFIG)]) | st.text()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["float32", "torch.bfloat16", "right", "config", 1, 2, 64, 128, 256]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


def assert_named_or_resolved(text: str) -> None:
    try:
        resolution = resolve_config(parse_document(text), checkpoint_dtype="float32")
    except (ConfigInvalid, FeatureNotServed) as error:
        # Whatever text came in, the answer is one that protobuf can carry.
        assert [str(violation).isascii() for violation in error.violations].count(True) == len(error.violations) > 0  # noqa: PT017
    else:
        assert isinstance(resolution.config, InferenceConfig)
        canonical_json(resolution.config.to_json())


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_any_text_is_resolved_or_refused_by_name(text: str) -> None:
    assert_named_or_resolved(text)


@given(st.dictionaries(NAMES, VALUES))
def test_any_neuron_config_is_resolved_or_refused_by_name(neuron_config: dict[str, Any]) -> None:
    assert_named_or_resolved(json.dumps({"neuron_config": neuron_config}))


@given(
    st.dictionaries(
        st.sampled_from(
            ["seq_len", "max_context_length", "max_length", "max_new_tokens", "batch_size", "tkg_batch_size"]
        ),
        st.integers(1, 600),
    ),
    st.booleans(),
)
def test_what_resolves_is_consistent(lengths: dict[str, int], enable_bucketing: bool) -> None:
    try:
        config = resolve(**lengths, enable_bucketing=enable_bucketing).config.neuron_config
    except ConfigInvalid:
        return
    assert config.max_context_length <= config.seq_len <= config.max_length
    assert config.context_encoding_buckets[-1] == config.max_context_length
    assert config.token_generation_buckets[-1] == config.max_length
    assert config.tkg_batch_size == config.max_batch_size >= config.ctx_batch_size
    assert config.max_new_tokens is None or 1 <= config.max_new_tokens <= config.seq_len
