"""A new submodel is one row of `bundle.abi.submodels`, beside the model code that traces it.

Nothing else is touched here: what plans reckon with and what the scheduler does follow from the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bundle.abi.submodels import SUBMODELS, Submodel
from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.config.submodels import SubmodelShape
from compiler_svc.models.registry import describe_model
from compiler_svc.planning.activations import measure_activations
from runtime_svc.engine.config import ChunkLimits
from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.kept_sequences import SessionKeeper
from runtime_svc.engine.kv.manager import KvManager
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.request import Finish, FinishReason, Request, Session
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan
from runtime_svc.engine.scheduler.policy import AlternatingSteps
from runtime_svc.engine.scheduler.scheduler import Scheduler
from tests.bundles.manifests import make_executable
from tests.ranks.scheduling import make_request, update

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
    request = make_request("a", (5, 6, 7), max_new_tokens=8)
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


PROMPT, STOP = (5, 6, 7, 8, 9), 99
#: A step writes the keys of the newest token and of the first `NUM_PROPOSALS` that another model proposes behind it.
NUM_PROPOSALS = 3


def verify(kv: KvManager, given: Sequence[int], session: Session | None = None) -> tuple[Scheduler, Request]:
    """Runs a step of `verification` for a request that lacks the keys of its prompt's last token."""
    scheduler = Scheduler(None, kv, max_running=1)  # type: ignore[arg-type]
    request = make_request("a", PROMPT, stop=[STOP], max_new_tokens=8, session=session)
    num_computed = len(PROMPT) - 1
    placement = kv.reserve(request, len(PROMPT) + NUM_PROPOSALS)
    assert placement is not None
    request.num_computed_tokens = num_computed
    row = ScheduledRow(0, request, num_computed, 1 + NUM_PROPOSALS, placement, samples=True)
    scheduler._running[request] = None
    scheduler._start(row)
    update(scheduler, StepPlan(make_executable("verification", 16, 1), (row,)), [given])
    return scheduler, request


def make_kv(layout: str) -> KvManager:
    keeper = SessionKeeper()
    return SlotManager(1, 64, keeper) if layout == "slots" else BlockManager(8, 4, caches_prefixes=True, keeper=keeper)


@pytest.mark.parametrize("layout", ["slots", "blocks"])
@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([STOP], 1),
        ([11, STOP], 2),
        ([11, 12, STOP], 3),
        ([11, STOP, 13, 14], 2),
        ([STOP, 12, 13, 14], 1),
        ([11, 12, 13, STOP], 4),
    ],
)
def test_a_session_keeps_no_more_tokens_than_have_keys(layout: str, given: list[int], taken: int) -> None:
    session = Session("caller", "s", 60.0, 0.0)
    scheduler, request = verify(make_kv(layout), given, session)
    assert request.output_token_ids == given[:taken]
    assert request.finish == Finish(FinishReason.STOP_TOKEN, stop_token_id=STOP)
    assert scheduler.statistics.generated_tokens == taken
    assert session.token_ids == [*PROMPT, *given[: taken - 1]], "all but the newest, whose keys none has written"
    assert session.num_written >= len(PROMPT) + NUM_PROPOSALS, "also what was proposed and not accepted"


@pytest.mark.parametrize("layout", ["slots", "blocks"])
@pytest.mark.parametrize("given", [[], [11], [11, 12], [11, 12, 13, 14]])
def test_a_sequence_goes_on_behind_what_was_accepted(layout: str, given: list[int]) -> None:
    scheduler, request = verify(make_kv(layout), given)
    assert request.num_computed_tokens == len(PROMPT) - 1 + len(given)
    assert request.num_tokens == request.num_computed_tokens + 1
    assert scheduler.running == (request,)


@pytest.mark.parametrize(
    ("given", "num_found"), [([11], 4), ([11, 12, 13], 4), ([11, 12, 13, 14], 8), ([11, 12, STOP, 14], 4)]
)
def test_others_find_only_blocks_full_of_tokens_that_were_accepted(given: list[int], num_found: int) -> None:
    kv = make_kv("blocks")
    verify(kv, given)
    assert kv.find_prefix(make_request("b", [*PROMPT, *given, *range(30, 40)])) == num_found
    # A key over the tokens that the sequence had before the step.
    assert kv.find_prefix(make_request("c", [*PROMPT, *range(30, 40)])) == 4


def test_a_stop_string_takes_back_tokens_and_their_keys() -> None:
    _, request = verify(make_kv("slots"), [11, 12, 13, 14])
    request.drop_newest(3)
    assert request.output_token_ids == [11]
    assert request.num_computed_tokens == len(PROMPT) + 1
