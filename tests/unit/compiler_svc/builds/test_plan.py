from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bundle.manifest import GenerationDefaults, Limits, Sampling, Serving, TargetKind, Tokens
from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.models.errors import ModelConfigInvalid, ModelNotServed
from compiler_svc.models.state import KeptAs
from compiler_svc.planning.build_plan import choose_kept, plan_build
from compiler_svc.planning.sampling import choose_generation_defaults, choose_sampling, warn_of_unserved_generation
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.random_weights import write_checkpoint


def resolve(**neuron_config: Any) -> NeuronConfig:
    return resolve_config({"neuron_config": neuron_config}, checkpoint_dtype="float32").config.neuron_config


def sampling(**values: Any) -> Sampling:
    defaults: dict[str, Any] = {
        "mode": "on_device",
        "semantics": "hf",
        "dynamic": False,
        "deterministic": False,
        "global_topk": 0,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    return Sampling(**(defaults | values))


@pytest.mark.parametrize(
    ("on_device", "expected"),
    [
        (None, sampling(mode="host", dynamic=True, chance="noise_keys")),
        ({}, sampling()),
        ({"top_k": 5, "temperature": 0.7}, sampling()),
        (
            {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
            sampling(global_topk=256, temperature=0.7, top_k=5, top_p=0.9, chance="noise_keys"),
        ),
        ({"do_sample": True}, sampling(global_topk=256, temperature=1.0, top_k=1, chance="noise_keys")),
        ({"dynamic": True}, sampling(dynamic=True, global_topk=256, chance="noise_keys")),
        ({"dynamic": True, "top_k": 5}, sampling(dynamic=True, global_topk=256, top_k=5, chance="noise_keys")),
        (
            {"dynamic": True, "do_sample": True, "deterministic": True, "global_topk": 0, "top_k": 0},
            sampling(dynamic=True, deterministic=True, temperature=1.0),
        ),
    ],
)
def test_sampling(on_device: dict[str, Any] | None, expected: Sampling) -> None:
    assert choose_sampling(resolve(on_device_sampling_config=on_device)) == expected


@pytest.mark.parametrize(
    ("neuron_config", "expected"),
    [
        ({}, None),
        ({"kv_cache_quant": True}, KeptAs(dtype="float8_e4m3fn")),
        ({"kv_quant_config": {"direct_cast": True}}, KeptAs(dtype="float8_e4m3fn")),
        (
            {"kv_quant_config": {"direct_cast": False, "quant_dtype": "int8"}, "kv_cache_quant": True},
            KeptAs(dtype="int8", key_scales="tensor", value_scales="tensor"),
        ),
        (
            {
                "kv_quant_config": {
                    "direct_cast": False,
                    "quant_dtype": "torch.float8_e4m3fn",
                    "k_quant_method": "per_channel_symmetric",
                    "v_quant_method": "per_key_symmetric",
                }
            },
            KeptAs(dtype="float8_e4m3fn", key_scales="channel", value_scales="head"),
        ),
    ],
)
def test_caches_keep_what_kv_quant_config_says(neuron_config: dict[str, Any], expected: KeptAs | None) -> None:
    assert choose_kept(resolve(**neuron_config)) == expected


def test_scales_that_a_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny"))
    with pytest.raises(CheckpointInvalid, match=r"self_attn\.k_scale: got missing; accepted: a tensor of shape \[1\]"):
        plan_build(checkpoint, resolve(kv_quant_config={"direct_cast": False}), target="cpu")


LLAMA: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
PENALIZED: dict[str, Any] = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "min_new_tokens": 2}
DYNAMIC = {"dynamic": True, "global_topk": 64}
TOKENS = Tokens(vocab_size=128, bos=None, eos=(2,), pad=0)


@pytest.mark.parametrize(
    ("file", "on_device", "expected"),
    [
        (LLAMA, DYNAMIC, GenerationDefaults(temperature=0.6, top_p=0.9)),
        (LLAMA, None, GenerationDefaults(temperature=0.6, top_p=0.9)),
        (LLAMA | {"top_k": 50}, DYNAMIC, GenerationDefaults(temperature=0.6, top_k=50, top_p=0.9)),
        (LLAMA | {"top_k": 100}, DYNAMIC, GenerationDefaults(temperature=0.6, top_k=64, top_p=0.9)),
        (LLAMA | {"top_k": 100}, None, GenerationDefaults(temperature=0.6, top_k=100, top_p=0.9)),
        (LLAMA | {"top_k": -1, "temperature": 0}, DYNAMIC, GenerationDefaults(temperature=0.0, top_k=0, top_p=0.9)),
        ({"do_sample": True}, DYNAMIC, GenerationDefaults(temperature=1.0)),
        # transformers is greedy without do_sample, whatever else the file says.
        ({"temperature": 0.6}, DYNAMIC, None),
        ({}, DYNAMIC, None),
        # Penalties and exclusions hold for greedy tokens, too.
        (PENALIZED, None, GenerationDefaults(repetition_penalty=1.1, no_repeat_ngram_size=3, min_new_tokens=2)),
        ({"min_p": 0.1}, None, None),
        (PENALIZED, DYNAMIC, GenerationDefaults(repetition_penalty=1.1, no_repeat_ngram_size=3, min_new_tokens=2)),
        (
            LLAMA | {"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.0},
            None,
            GenerationDefaults(temperature=0.6, top_p=0.9, min_p=0.1, typical_p=0.9),
        ),
        # An end is no bad word in transformers, and what the model does not have cannot be generated.
        (
            {"bad_words_ids": [[2], [5, 2], [6], [7, 300]], "suppress_tokens": [2, 8, 300]},
            None,
            GenerationDefaults(bad_words=((5, 2), (6,), (2,), (8,))),
        ),
        # The configuration says how to sample, or that requests cannot choose.
        (LLAMA, DYNAMIC | {"do_sample": True}, None),
        (LLAMA, {}, None),
        (LLAMA, {"do_sample": True, "temperature": 0.7}, None),
    ],
)
def test_generation_defaults(
    file: dict[str, Any], on_device: dict[str, Any] | None, expected: GenerationDefaults | None
) -> None:
    assert choose_generation_defaults(file, resolve(on_device_sampling_config=on_device), TOKENS, "cpu") == expected


@pytest.mark.parametrize("options", [{}, {"output_logits": True}, {"logit_processors": True}])
def test_penalties_are_defaults_on_devices_that_serve_processors(options: dict[str, Any]) -> None:
    """Those of other bundles return no logits from which ranks could pick."""
    file = LLAMA | {"min_p": 0.1, "repetition_penalty": 1.1}
    config = resolve(on_device_sampling_config=DYNAMIC, **options)
    drawn = GenerationDefaults(temperature=0.6, top_p=0.9)
    expected = replace(drawn, min_p=0.1, repetition_penalty=1.1) if options else drawn
    assert choose_generation_defaults(file, config, TOKENS, "trn2") == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("do_sample", "yes"), ("temperature", -1), ("temperature", "hot")],
        *[("top_k", -2), ("top_k", 1.5), ("top_p", 1.5), ("min_p", 2), ("typical_p", 0)],
        *[("repetition_penalty", 0), ("repetition_penalty", True), ("no_repeat_ngram_size", 1.5)],
        *[("min_new_tokens", -1), ("bad_words_ids", [3]), ("bad_words_ids", [[]]), ("suppress_tokens", [-1])],
    ],
)
def test_generation_defaults_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        choose_generation_defaults(LLAMA | {name: value}, resolve(on_device_sampling_config=None), TOKENS, "cpu")
    (violation,) = caught.value.violations
    assert violation.field == f"generation_config.{name}"


def test_more_bad_words_than_requests_may_name_are_refused() -> None:
    many = {"suppress_tokens": [*range(1025)]}
    with pytest.raises(ModelNotServed, match="got '1025 tokens'; accepted: at most 1024"):
        choose_generation_defaults(many, resolve(), replace(TOKENS, vocab_size=2048), "cpu")


@pytest.mark.parametrize("target", ["cpu", "trn2"])
def test_what_is_no_default_is_named(target: TargetKind) -> None:
    file = PENALIZED | {"epsilon_cutoff": 0.1, "num_beams": 4, "min_p": 0.0, "bad_words_ids": [[4]], "top_h": None}
    named = [*warn_of_unserved_generation(file, resolve(on_device_sampling_config=DYNAMIC), target)]
    by_executables = ["repetition_penalty: 1.1", "no_repeat_ngram_size: 3", "min_new_tokens: 2", "bad_words_ids: [[4]]"]
    expected = ["epsilon_cutoff: 0.1", "num_beams: 4", *(by_executables if target == "trn2" else [])]
    assert named == [f"generation_config.{one} is no default of requests here" for one in expected]


def test_limits_are_those_of_the_executables(tmp_path: Path) -> None:
    lists = {"context_encoding_buckets": [8, 48], "token_generation_buckets": [16, 32], "enable_bucketing": True}
    config = resolve(seq_len=64, max_length=96, batch_size=3, ctx_batch_size=1, max_new_tokens=20, **lists)
    plan = plan_build(Checkpoint.open(write_checkpoint(tmp_path / "tiny")), config, target="cpu")
    assert plan.limits == Limits(
        max_context_length=32, max_length=32, max_new_tokens=20, ctx_batch_size=1, tkg_batch_size=3
    )
    assert plan.model.max_length == 96
    assert plan.tokens.eos == (2, 3)
    assert plan.serving == Serving()
