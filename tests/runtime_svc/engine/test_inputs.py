"""Step plans as numbers, against the ABI."""

from __future__ import annotations

import msgspec

from bundle.manifest import Sampling
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.inputs import StepBuilder
from runtime_svc.engine.request import Request, SamplingParams, StopConditions, Timeline
from runtime_svc.engine.scheduler import ScheduledRow, StepPlan
from runtime_svc.engine.inputs import uniform
from tests.runtime_svc.fakes import make_manifest


def make_request(tokens: tuple[int, ...], sampling: SamplingParams, *, top_logprobs: int | None = None) -> Request:
    request = Request("r", tokens, sampling, StopConditions(9), Timeline(0.0), top_logprobs=top_logprobs)
    request.slot = 1
    return request


def test_prompt_step_pads_tokens_and_idles_rows() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=2, prompt_buckets=(4,))
    request = make_request((11, 12, 13), SamplingParams(0.5, 20, 0.25, 7))
    plan = StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], (ScheduledRow(0, 1, request, 3),))
    step = StepBuilder(manifest).build(plan)
    assert step.tag == "context_encoding_4"
    assert step.inputs == {
        "input_ids": [11, 12, 13, 0, 0, 0, 0, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
        "seq_ids": [1, 3],
        "num_tokens": [3, 1],
        "sampling_params": [20.0, 0.25, 0.5, 1.0, 1.0, 1.0],
        "rand": [uniform(7, 0), 0.5],
    }
    assert step.top_logprobs is None


def test_left_padded_prompts_end_their_rows() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=3, prompt_buckets=(4,), flags=("left_padded", "tokens"))
    short, whole = (make_request(tokens, SamplingParams(0.0, 0, 1.0, 7)) for tokens in ((11, 12), (21, 22, 23, 24)))
    rows = (ScheduledRow(0, 1, short, 2), ScheduledRow(1, 2, whole, 4))
    step = StepBuilder(manifest).build(StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], rows))
    assert step.inputs == {
        "input_ids": [0, 0, 11, 12, 21, 22, 23, 24, 0, 0, 0, 0],
        "position_ids": [0, 0, 0, 1, 0, 1, 2, 3, 0, 0, 0, 0],
        "seq_ids": [1, 2, 3],
        "num_tokens": [2, 4, 1],
    }


def test_logits_are_asked_for_where_a_row_wants_them() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=2, prompt_buckets=(4,))
    requests = [make_request((11,), SamplingParams(0.0, 0, 1.0, 7)) for _ in range(2)]
    rows = tuple(ScheduledRow(row, row, request, 1) for row, request in enumerate(requests))
    plan = StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], rows)
    assert not StepBuilder(manifest).build(plan).return_logits
    requests[1].wants_logits = True
    assert StepBuilder(manifest).build(plan).return_logits


def test_token_step_feeds_the_newest_token_at_its_position() -> None:
    manifest = make_manifest(num_slots=3)
    request = make_request((11, 12), SamplingParams(0.0, 0, 1.0, 9), top_logprobs=2)
    request.num_computed_tokens = 3
    request.output_token_ids += [21, 22]
    plan = StepPlan(BucketTable.from_manifest(manifest).token_generation[0], (ScheduledRow(1, 1, request, 1),))
    step = StepBuilder(manifest).build(plan)
    assert step.inputs["input_ids"] == [0, 22, 0]
    assert step.inputs["position_ids"] == [0, 3, 0]
    assert step.inputs["seq_ids"] == [3, 1, 3]
    assert step.inputs["rand"] == [0.5, uniform(9, 2), 0.5]
    assert step.top_logprobs == 2


def test_a_step_that_follows_is_one_token_further_and_takes_that_from_the_ranks() -> None:
    manifest = make_manifest(num_slots=3)
    request = make_request((11, 12), SamplingParams(1.0, 0, 1.0, 9))
    request.num_computed_tokens = 3
    request.output_token_ids += [21, 22]
    rows = (ScheduledRow(1, 1, request, 1),)
    step = StepBuilder(manifest).build(
        StepPlan(BucketTable.from_manifest(manifest).token_generation[0], rows, follows=True)
    )
    assert step.follows
    assert step.inputs["input_ids"] == [0, 0, 0], "not read"
    assert step.inputs["position_ids"] == [0, 4, 0]
    assert step.inputs["seq_ids"] == [3, 1, 3]
    assert step.inputs["rand"] == [0.5, uniform(9, 3), 0.5]


def test_only_inputs_of_the_executable_are_built_unless_the_executor_samples() -> None:
    on_device = make_manifest(flags=("tokens",))
    host = msgspec.structs.replace(
        make_manifest(flags=("logits",)), sampling=msgspec.structs.replace(on_device.sampling, mode="host")
    )
    assert isinstance(host.sampling, Sampling)
    for manifest, names in [
        (on_device, {"input_ids", "position_ids", "seq_ids"}),
        (host, {"input_ids", "position_ids", "seq_ids", "sampling_params", "rand"}),
    ]:
        request = make_request((11,), SamplingParams(0.0, 0, 1.0, 9))
        request.num_computed_tokens = 1
        request.output_token_ids.append(5)
        plan = StepPlan(BucketTable.from_manifest(manifest).token_generation[0], (ScheduledRow(1, 1, request, 1),))
        assert set(StepBuilder(manifest).build(plan).inputs) == names


def test_deterministic_bundle_gets_one_half() -> None:
    manifest = make_manifest(prompt_buckets=(4,))
    manifest = msgspec.structs.replace(
        manifest, sampling=msgspec.structs.replace(manifest.sampling, deterministic=True)
    )
    request = make_request((11,), SamplingParams(1.0, 0, 1.0, 7))
    plan = StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], (ScheduledRow(0, 1, request, 1),))
    assert StepBuilder(manifest).build(plan).inputs["rand"] == [0.5]
