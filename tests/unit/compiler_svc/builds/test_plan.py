from pathlib import Path
from typing import Any

import pytest

from bundle.manifest import Limits, Sampling, Serving
from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.planning.build_plan import choose_sampling, plan_build
from compiler_svc.weights.checkpoint import Checkpoint
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
        (None, sampling(mode="host", dynamic=True)),
        ({}, sampling()),
        ({"top_k": 5, "temperature": 0.7}, sampling()),
        (
            {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
            sampling(global_topk=256, temperature=0.7, top_k=5, top_p=0.9),
        ),
        ({"do_sample": True}, sampling(global_topk=256, temperature=1.0, top_k=1)),
        ({"dynamic": True}, sampling(dynamic=True, global_topk=256)),
        ({"dynamic": True, "top_k": 5}, sampling(dynamic=True, global_topk=256, top_k=5)),
        (
            {"dynamic": True, "do_sample": True, "deterministic": True, "global_topk": 0, "top_k": 0},
            sampling(dynamic=True, deterministic=True, temperature=1.0),
        ),
    ],
)
def test_sampling(on_device: dict[str, Any] | None, expected: Sampling) -> None:
    assert choose_sampling(resolve(on_device_sampling_config=on_device)) == expected


def test_executables_limits_and_rows(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny"))
    config = resolve(
        seq_len=64,
        max_length=96,
        batch_size=3,
        ctx_batch_size=1,
        max_new_tokens=20,
        enable_bucketing=True,
        context_encoding_buckets=[8, 48],
        token_generation_buckets=[16, 32],
    )
    plan = plan_build(checkpoint, config)
    assert [submodel.tag for submodel in plan.submodels] == [
        "context_encoding_8",
        "context_encoding_48",
        "token_generation_16",
        "token_generation_32",
    ]
    assert plan.limits == Limits(
        max_context_length=32, max_length=32, max_new_tokens=20, ctx_batch_size=1, tkg_batch_size=3
    )
    assert (plan.model.num_slots, plan.model.max_length) == (3, 96)
    assert plan.tokens.eos == (2, 3)
    assert plan.serving == Serving()


def test_active_tokens_and_positions_cap_buckets_and_limits(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny"))

    def plan(**values: Any) -> tuple[list[str], int, int]:
        planned = plan_build(checkpoint, resolve(seq_len=64, **values))
        limits = planned.limits
        return [submodel.tag for submodel in planned.submodels], limits.max_context_length, limits.max_length

    assert plan() == (["context_encoding_64", "token_generation_64"], 64, 64)
    assert plan(n_active_tokens=16) == (["context_encoding_16", "token_generation_64"], 16, 64)
    assert plan(n_positions=48) == (["context_encoding_48", "token_generation_48"], 48, 48)


def test_what_the_configuration_asks_of_the_runtime(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "tiny"))
    plan = plan_build(checkpoint, resolve(allow_input_truncation=True, skip_warmup=True, padding_side="left"))
    assert plan.serving == Serving(input_truncation=True, skip_warmup=True)
    assert [submodel.submodel for submodel in plan.submodels if "left_padded" in submodel.flags] == ["context_encoding"]
