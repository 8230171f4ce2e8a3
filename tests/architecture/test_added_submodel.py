"""A new submodel is one row of `bundle.abi.submodels`, beside the model code that traces it.

Nothing else is touched here: what plans reckon with and what the scheduler does follow from the row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bundle.abi.submodels import SUBMODELS, Submodel
from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.config.submodels import SubmodelShape
from compiler_svc.models.registry import describe_model
from compiler_svc.planning.activations import measure_activations
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.config import ChunkLimits
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.request import Request, StopConditions, Timeline
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.policy import AlternatingSteps
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.bundles.manifests import make_executable

ROWS = {
    #: Prompts behind a prefix that the KV cache holds.
    "prefix_encoding": Submodel(rows="ctx_batch_size", tokens="bucket", bucket="tokens", outputs="last"),
    #: Guesses of another model.
    "verification": Submodel(rows="tkg_batch_size", tokens="speculation_length", bucket="positions", outputs="all"),
    "late_generation": Submodel(rows="tkg_batch_size", tokens=1, bucket="positions", outputs="last"),
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in ROWS.items():
        monkeypatch.setitem(SUBMODELS, name, row)  # type: ignore[arg-type]


def measure(name: Any, batch_size: int, bucket: tuple[int, ...], **attributes: Any) -> int:
    config = resolve_config({"neuron_config": {}}, checkpoint_dtype="bfloat16", target="trn1").config.neuron_config
    assert isinstance(config, NeuronConfig)
    shape = SubmodelShape(name, batch_size, (bucket,))
    return measure_activations(describe_model(MODEL), replace(config, **attributes), [shape])


def test_plans_reckon_with_prompts_behind_a_prefix() -> None:
    stream, scores = 2 * 32 * 64 * 2, 8 * 32 * (32 + 64) * (4 + 2)
    attention = 32 * 64 * 2 + 32 * 8 * 2 * (8 + 4) * 2 + scores
    assert measure("prefix_encoding", 1, (32, 64), attn_kernel_enabled=False) == stream + attention


def test_plans_reckon_with_every_output_of_a_verification() -> None:
    stream, logits = 2 * 8 * 64 * 2, 8 * ((64 + 100) * 2 + 8 * 100)
    assert measure("verification", 2, (512,), speculation_length=4) == stream + logits


def schedule(name: Any, num_tokens: int) -> tuple[Scheduler, StepPlan]:
    """A scheduler whose one request computes its last `num_tokens` tokens in a step of 8 tokens or positions."""
    request = Request(
        request_id="a",
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(0.0, 0, 1.0, 0),
        stop=StopConditions(max_new_tokens=8),
        timeline=Timeline(arrived_s=0.0),
    )
    request.num_computed_tokens = 3 - num_tokens
    kv = SlotManager(1, 64)
    placement = kv.reserve(request, 3)
    assert placement is not None
    row = ScheduledRow(0, request, request.num_computed_tokens, num_tokens, placement, samples=True)
    scheduler = Scheduler(None, kv, max_running=1)  # type: ignore[arg-type]
    scheduler._running[request] = None
    return scheduler, StepPlan(make_executable(name, 8, 1), (row,))


@pytest.mark.parametrize(("name", "padding"), [("prefix_encoding", [6]), ("verification", []), ("late_generation", [])])
def test_usage_counts_the_padding_of_prompts(name: str, padding: list[int]) -> None:
    scheduler, plan = schedule(name, 2)
    scheduler.update(plan, [[9]], now_s=1.0)
    assert list(plan.rows[0].request.bucket_padding.values()) == padding


@pytest.mark.parametrize(
    ("name", "is_planned"), [("prefix_encoding", False), ("verification", False), ("late_generation", True)]
)
def test_only_a_step_of_one_token_a_row_has_a_step_planned_behind_it(name: str, is_planned: bool) -> None:
    scheduler, plan = schedule(name, 1)
    rooms = {(8, 0): plan.executable}
    buckets = BucketTable((), (plan.executable,), packs_rows=True, max_sequences=1, rooms=rooms)
    scheduler.policy = AlternatingSteps(buckets, ChunkLimits())
    assert (scheduler.schedule_behind(plan) is not None) == is_planned
