"""Step plans as numbers, against the ABI."""

from __future__ import annotations

import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bundle.manifest import Sampling
from runtime_svc.engine.inputs import StepBuilder, uniform
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request, SamplingParams, StopConditions, Timeline
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan
from tests.ranks.fakes import make_manifest


def make_request(tokens: tuple[int, ...], sampling: SamplingParams, *, top_logprobs: int | None = None) -> Request:
    return Request("r", tokens, sampling, StopConditions(9), Timeline(0.0), top_logprobs=top_logprobs)


def scheduled(row: int, slot: int, request: Request, start: int, num_tokens: int) -> ScheduledRow:
    samples = start + num_tokens == request.num_tokens
    return ScheduledRow(row, request, start, num_tokens, Placement((slot,)), samples)


def test_prompt_step_pads_tokens_and_idles_rows() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=2, prompt_buckets=(4,))
    request = make_request((11, 12, 13), SamplingParams(0.5, 20, 0.25, 7))
    plan = StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], (scheduled(0, 1, request, 0, 3),))
    step = StepBuilder(manifest).build(plan)
    assert step.tag == "context_encoding_4"
    assert step.inputs == {
        "input_ids": [11, 12, 13, 0, 0, 0, 0, 0],
        "position_ids": [0, 1, 2, 0, 0, 0, 0, 0],
        "seq_ids": [1, 3],
        "num_tokens": [3, 1],
        "sampling_params": [20.0, 0.25, 0.5, 1.0, 1.0, 1.0],
        "rand": [uniform(7, 0), 0.5],
    }
    assert step.top_logprobs is None


def test_a_part_of_a_prompt_keeps_its_positions_and_samples_with_its_last_token() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=3, prompt_buckets=(4,))
    requests = [make_request((11, 12, 13, 14, 15), SamplingParams(1.0, 0, 1.0, 7)) for _ in range(3)]
    requests[2].output_token_ids.append(16)
    rows = [
        scheduled(row, row, request, start, 2)
        for row, request, start in zip(range(3), requests, (1, 3, 4), strict=True)
    ]
    assert [row.samples for row in rows] == [False, True, True]
    step = StepBuilder(manifest).build(StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], tuple(rows)))
    assert step.inputs["input_ids"] == [12, 13, 0, 0, 14, 15, 0, 0, 15, 16, 0, 0]
    assert step.inputs["position_ids"] == [1, 2, 0, 0, 3, 4, 0, 0, 4, 5, 0, 0]
    assert step.inputs["num_tokens"] == [2, 2, 2]
    assert step.inputs["rand"] == [0.5, uniform(7, 0), uniform(7, 1)]


def test_left_padded_prompts_end_their_rows() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=3, prompt_buckets=(4,), flags=("left_padded", "tokens"))
    short, whole = (make_request(tokens, SamplingParams(0.0, 0, 1.0, 7)) for tokens in ((11, 12), (21, 22, 23, 24)))
    rows = (scheduled(0, 1, short, 0, 2), scheduled(1, 2, whole, 0, 4))
    step = StepBuilder(manifest).build(StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], rows))
    assert step.inputs == {
        "input_ids": [0, 0, 11, 12, 21, 22, 23, 24, 0, 0, 0, 0],
        "position_ids": [0, 0, 0, 1, 0, 1, 2, 3, 0, 0, 0, 0],
        "seq_ids": [1, 2, 3],
        "num_tokens": [2, 4, 1],
    }


def test_logits_are_asked_for_if_a_row_wants_them() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=2, prompt_buckets=(4,))
    requests = [make_request((11,), SamplingParams(0.0, 0, 1.0, 7)) for _ in range(2)]
    rows = tuple(scheduled(row, row, request, 0, 1) for row, request in enumerate(requests))
    plan = StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], rows)
    assert not StepBuilder(manifest).build(plan).return_logits
    requests[1].wants_logits = True
    assert StepBuilder(manifest).build(plan).return_logits


def test_token_step_feeds_the_newest_token_at_its_position() -> None:
    manifest = make_manifest(num_slots=3)
    request = make_request((11, 12), SamplingParams(0.0, 0, 1.0, 9), top_logprobs=2)
    request.num_computed_tokens = 3
    request.output_token_ids += [21, 22]
    plan = StepPlan(BucketTable.from_manifest(manifest).token_generation[0], (scheduled(1, 1, request, 3, 1),))
    step = StepBuilder(manifest).build(plan)
    assert step.inputs["input_ids"] == [0, 22, 0]
    assert step.inputs["position_ids"] == [0, 3, 0]
    assert step.inputs["seq_ids"] == [3, 1, 3]
    assert step.inputs["rand"] == [0.5, uniform(9, 2), 0.5]
    assert step.top_logprobs == 2


def test_a_step_that_depends_on_the_previous_one_leaves_its_tokens_to_the_ranks() -> None:
    manifest = make_manifest(num_slots=3)
    request = make_request((11, 12), SamplingParams(1.0, 0, 1.0, 9))
    request.num_computed_tokens = 3
    request.output_token_ids += [21, 22]
    rows = (ScheduledRow(1, request, 4, 1, Placement((1,)), samples=True),)
    step = StepBuilder(manifest).build(
        StepPlan(BucketTable.from_manifest(manifest).token_generation[0], rows, depends_on_previous=True)
    )
    assert step.depends_on_previous
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
        plan = StepPlan(BucketTable.from_manifest(manifest).token_generation[0], (scheduled(1, 1, request, 1, 1),))
        assert set(StepBuilder(manifest).build(plan).inputs) == names


def test_deterministic_bundle_gets_one_half() -> None:
    manifest = make_manifest(prompt_buckets=(4,))
    manifest = msgspec.structs.replace(
        manifest, sampling=msgspec.structs.replace(manifest.sampling, deterministic=True)
    )
    request = make_request((11,), SamplingParams(1.0, 0, 1.0, 7))
    plan = StepPlan(BucketTable.from_manifest(manifest).context_encoding[0], (scheduled(0, 1, request, 0, 1),))
    assert StepBuilder(manifest).build(plan).inputs["rand"] == [0.5]


# Random numbers


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_float32_holds_the_number_and_it_is_below_one(seed: int, index: int) -> None:
    number = uniform(seed, index)
    assert struct.unpack("f", struct.pack("f", number))[0] == number
    assert 0 <= number < 1


def test_numbers_never_change() -> None:
    """A client's seed must reproduce its tokens after every release."""
    numbers = [uniform(seed, index) for seed, index in [(0, 0), (0, 1), (7, 0), (2**64 - 1, 2**31)]]
    assert numbers == [0.12311941385269165, 0.5826717615127563, 0.48232781887054443, 0.3066132664680481]


def test_numbers_are_spread_evenly() -> None:
    counts = [0] * 16
    for seed in range(40):
        for index in range(100):
            counts[int(uniform(seed, index) * 16)] += 1
    assert sum((count - 250) ** 2 / 250 for count in counts) < 37.7, "chi squared, p = 0.001 at 15 degrees of freedom"
