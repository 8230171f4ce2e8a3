"""Huge sizes in a request or checkpoint are refused by name before a plan loops over them."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from timeit import timeit
from typing import Any

import pytest

from bundle.errors import KilnError
from compiler_svc.config.domains import MAX_BUCKETS, MAX_TEXTS
from compiler_svc.errors import ConfigInvalid
from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.size_limits import MAX_POSITIONS, SIZE_LIMITS
from compiler_svc.planning.admission import MAX_EXECUTABLES, admit_request
from compiler_svc.planning.planner import Planner
from compiler_svc.planning.report import PlanReport
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.directory import MAX_TEXT_BYTES
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.headers import write_headers
from tests.unit.compiler_svc.planning.planning import compile_request, request

HUGE = 2**31 - 1
#: What a test may allocate beyond what the process has.
ROOM_BYTES = 512 << 20
#: What a plan may take, in times of a million calls of Python on this processor, which other programs may slow down
#: alike: three times what it takes.
MAX_PLAN = 250.0


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """A loop over a huge size ends in MemoryError instead of taking the host down."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + ROOM_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


def refuse(planner: Planner, model: str, document: dict[str, Any], target: str = "trn1") -> KilnError:
    with pytest.raises(KilnError) as caught:
        planner.plan(request(model, target, document=document))
    return caught.value


#: The attributes that decoders read, each with a value that keeps its other rules.
ATTACKS = {
    "num_hidden_layers": HUGE,
    "num_attention_heads": HUGE + 1,
    "num_key_value_heads": HUGE + 1,
    "head_dim": HUGE + 1,
    "vocab_size": HUGE,
    "hidden_size": HUGE + 1,
    "intermediate_size": HUGE,
    "max_position_embeddings": 2**53 - 1,
}


@pytest.mark.parametrize(("name", "value"), ATTACKS.items())
def test_a_huge_size_of_a_pickled_model(planner: Planner, pickled: str, name: str, value: int) -> None:
    refused = refuse(planner, pickled, {name: value})
    assert isinstance(refused, ModelConfigInvalid)
    (violation,) = refused.violations
    assert (violation.field, violation.value) == (name, str(value))
    assert violation.accepted == f"an integer from 1 to {SIZE_LIMITS[name].largest}"


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("num_hidden_layers", HUGE, "146, the number of the checkpoint's tensors"),
        ("num_hidden_layers", 147, "146, the number of the checkpoint's tensors"),
        ("num_attention_heads", HUGE + 1, "128256, the longest axis"),
        ("vocab_size", HUGE, "128256, the longest axis"),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "trn1"])
def test_a_huge_size_beside_headers(planner: Planner, name: str, value: int, held: str, target: str) -> None:
    refused = refuse(planner, "1b", {name: value}, target)
    assert isinstance(refused, ModelConfigInvalid)
    (violation,) = refused.violations
    assert (violation.field, violation.value) == (name, str(value))
    assert violation.accepted.startswith(f"at most {held}")


@pytest.mark.parametrize("model", ["1b", "pickled"])
def test_compiles_are_refused_like_plans(models: Path, pickled: str, model: str) -> None:
    asked = compile_request(model, document={"num_hidden_layers": HUGE})
    with pytest.raises(ModelConfigInvalid, match="num_hidden_layers: got 2147483647"):
        admit_request(asked, (models,))


def test_a_draft_model_has_the_same_limits(planner: Planner, pickled: str) -> None:
    draft = {"draft_model_path": pickled, "draft_config": {"num_hidden_layers": HUGE}, "worker_cls": "a.B"}
    neuron_config = {"enable_fused_speculation": True, "speculation_length": 4, "on_device_sampling_config": {}}
    refused = refuse(planner, "1b", {"neuron_config": neuron_config, "fused_spec_config": draft})
    assert [str(one) for one in refused.violations] == [
        f"num_hidden_layers: got {HUGE}; accepted: an integer from 1 to {SIZE_LIMITS['num_hidden_layers'].largest}"
    ]


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("seq_len", MAX_POSITIONS + 1, MAX_POSITIONS),
        ("token_generation_buckets", [MAX_POSITIONS + 1], MAX_POSITIONS),
        ("context_encoding_buckets", [*range(1, MAX_BUCKETS + 2)], MAX_BUCKETS),
        ("prefix_buckets", [*range(1, MAX_BUCKETS + 2)], MAX_BUCKETS),
        ("token_generation_batches", [*range(1, MAX_BUCKETS + 2)], MAX_BUCKETS),
        ("modules_to_not_convert", ["lm_head"] * (MAX_TEXTS + 1), MAX_TEXTS),
        ("lora_config", {"lora_ckpt_paths": {str(number): "a" for number in range(MAX_TEXTS + 1)}}, MAX_TEXTS),
    ],
)
def test_sizes_of_the_request(planner: Planner, name: str, value: object, limit: int) -> None:
    refused = refuse(planner, "1b", {"neuron_config": {name: value}})
    assert isinstance(refused, ConfigInvalid)
    assert refused.violations[0].field.startswith(f"neuron_config.{name}")
    assert str(limit) in refused.violations[0].accepted


def test_lists_that_multiply(planner: Planner) -> None:
    lists = {"context_encoding_buckets": [*range(1, 101)], "prefix_buckets": [*range(1, 101)]}
    options = {"is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": 1, "pa_num_blocks": 128}
    refused = refuse(planner, "1b", {"neuron_config": {"enable_bucketing": True, **lists, **options}})
    (violation,) = refused.violations
    assert violation.value == "lists of buckets that make 10101 executables"
    assert violation.accepted == f"at most {MAX_EXECUTABLES} executables"


def test_a_plan_at_the_limits_is_quick(planner: Planner, pickled: str) -> None:
    document = {
        "num_hidden_layers": SIZE_LIMITS["num_hidden_layers"].largest,
        "num_attention_heads": 1024,
        "num_key_value_heads": 512,
        "head_dim": 128,
        "neuron_config": {
            "seq_len": MAX_POSITIONS,
            "tp_degree": 32,
            "enable_bucketing": True,
            "context_encoding_buckets": [*range(1, MAX_BUCKETS + 1)],
            "token_generation_buckets": [*range(1, MAX_BUCKETS + 1)],
            "lora_config": {"target_modules": [f"module{number}" for number in range(MAX_TEXTS)]},
            "quantized": True,
            "quantized_checkpoints_path": "q",
            "modules_to_not_convert": [f"module{number}" for number in range(MAX_TEXTS)],
        },
    }
    reports: list[PlanReport] = []
    asked = request(pickled, "trn1", document=document)
    calls_s = timeit(lambda: None, number=1_000_000, timer=time.process_time)
    plan_s = timeit(lambda: reports.append(planner.plan(asked)), number=1, timer=time.process_time)
    assert not reports[0].fits
    assert plan_s < MAX_PLAN * calls_s


def test_a_long_json_file_of_a_checkpoint_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(CheckpointInvalid, match=r"config\.json: got 67108865 bytes"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("target", ["cpu", "trn1"])
def test_sequences_stay_within_learned_positions(planner: Planner, models: Path, target: str) -> None:
    """Nothing else stops a model of learned positions from reading behind its table."""
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 300, "n_positions": 96, "dtype": "bfloat16"}
    name = f"learned-{target}"
    write_headers(models / name, config | {"n_embd": 64, "n_head": 4, "n_layer": 2}, num_shards=1)
    refused = refuse(planner, name, {"neuron_config": {"seq_len": 97, "max_context_length": 64}}, target)
    assert isinstance(refused, ConfigInvalid)
    assert [str(one) for one in refused.violations] == [
        "neuron_config.seq_len: got 97; accepted: at most 96, the positions that the model has learned"
    ]
    planner.plan(request(name, target, seq_len=96, max_context_length=64))
