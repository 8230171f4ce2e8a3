from pathlib import Path
from typing import Any

import pytest

from bundle.manifest import Limits, Sampling
from compiler_svc.builds.plan import choose_sampling, plan_build
from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.weights.checkpoint import Checkpoint
from tests.compiler_svc.random_checkpoint import write_checkpoint


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
