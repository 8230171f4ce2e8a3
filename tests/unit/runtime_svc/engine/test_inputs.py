"""Step plans as numbers, against the ABI."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.abi.inputs import ADAPTERS, PROCESSORS
from bundle.abi.submodels import SubmodelName
from bundle.manifest import Manifest, Sampling
from execution.sampling_parameters import SamplingParams
from execution.step import Step
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepBuilder, StepPlan, make_noise_keys, uniform
from tests.bundles.manifests import DYNAMIC, DYNAMIC_FLAGS
from tests.ranks.fakes import make_manifest
from tests.ranks.scheduling import make_request
from tests.ranks.step_values import list_values

SEEDED = SamplingParams(1.0, 0, 1.0, 7)


def scheduled(row: int, slot: int, prompt: Sequence[int], start: int, num_tokens: int, **fields: Any) -> ScheduledRow:
    """A row that computes tokens of a request, and samples if they are its newest or those that are to come."""
    request = make_request("r", prompt, **fields)
    samples = start + num_tokens >= request.num_tokens
    return ScheduledRow(row, request, start, num_tokens, Placement((slot,)), samples)


def build(manifest: Manifest, submodel: SubmodelName, *rows: ScheduledRow, depends_on_previous: bool = False) -> Step:
    executable = getattr(BucketTable.from_manifest(manifest), submodel)[0]
    return StepBuilder(manifest).build(StepPlan(executable, rows, depends_on_previous=depends_on_previous))


def test_prompt_step_pads_tokens_and_idles_rows() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=2, prompt_buckets=(4,))
    sampling = SamplingParams(0.5, 20, 0.25, 7)
    step = build(manifest, "context_encoding", scheduled(0, 1, (11, 12, 13), 0, 3, sampling=sampling))
    assert (step.tag, step.top_logprobs, step.return_logits) == ("context_encoding_4", None, False)
    assert list_values(step.inputs) == {
        "input_ids": [11, 12, 13, 0, 0, 0, 0, 0],
        "position_ids": [0, 1, 2, 0, 0, 0, 0, 0],
        "seq_ids": [1, 3],
        "num_tokens": [3, 1],
        "sampling_params": [20.0, 0.25, 0.5, 1.0, 1.0, 1.0],
        "noise_keys": [*make_noise_keys(7, 3), 0, 0],
    }


def test_a_part_of_a_prompt_keeps_its_positions_and_samples_with_its_last_token() -> None:
    manifest, prompt = make_manifest(num_slots=3, ctx_batch_size=3, prompt_buckets=(4,)), (11, 12, 13, 14, 15)
    rows = [
        scheduled(row, row, prompt, start, 2, sampling=SEEDED, output_token_ids=output)
        for row, (start, output) in enumerate(((1, []), (3, []), (4, [16])))
    ]
    assert [row.samples for row in rows] == [False, True, True]
    step = build(manifest, "context_encoding", *rows)
    assert step.inputs["input_ids"].tolist() == [12, 13, 0, 0, 14, 15, 0, 0, 15, 16, 0, 0]
    assert step.inputs["position_ids"].tolist() == [1, 2, 0, 0, 3, 4, 0, 0, 4, 5, 0, 0]
    assert step.inputs["num_tokens"].tolist() == [2, 2, 2]
    assert step.inputs["noise_keys"].tolist() == [0, 0, *make_noise_keys(7, 5), *make_noise_keys(7, 6)]


def test_left_padded_prompts_end_their_rows() -> None:
    manifest = make_manifest(num_slots=3, ctx_batch_size=3, prompt_buckets=(4,), flags=("left_padded", "tokens"))
    rows = (scheduled(0, 1, (11, 12), 0, 2), scheduled(1, 2, (21, 22, 23, 24), 0, 4))
    assert list_values(build(manifest, "context_encoding", *rows).inputs) == {
        "input_ids": [0, 0, 11, 12, 21, 22, 23, 24, 0, 0, 0, 0],
        "position_ids": [0, 0, 0, 1, 0, 1, 2, 3, 0, 0, 0, 0],
        "seq_ids": [1, 2, 3],
        "num_tokens": [2, 4, 1],
    }


def test_rows_name_the_slots_of_their_adapters() -> None:
    manifest = make_manifest(num_slots=3, flags=(ADAPTERS, *DYNAMIC_FLAGS))
    rows = (scheduled(0, 0, (5, 6), 1, 1, adapter_slot=2), scheduled(1, 1, (5, 6), 1, 1))
    assert build(manifest, "token_generation", *rows).inputs["adapter_ids"].tolist() == [2, -1, -1]


def test_logits_are_asked_for_if_a_row_wants_them() -> None:
    rows = (scheduled(0, 0, (11,), 0, 1), scheduled(1, 1, (11,), 0, 1, wants_logits=True))
    assert build(make_manifest(num_slots=3, ctx_batch_size=2), "context_encoding", *rows).return_logits


def test_token_step_feeds_the_newest_token_at_its_position() -> None:
    row = scheduled(1, 1, (11, 12), 3, 1, sampling=SEEDED, output_token_ids=[21, 22], top_logprobs=2)
    step = build(make_manifest(num_slots=3), "token_generation", row)
    assert step.inputs["input_ids"].tolist() == [0, 22, 0]
    assert step.inputs["position_ids"].tolist() == [0, 3, 0]
    assert step.inputs["seq_ids"].tolist() == [3, 1, 3]
    assert step.inputs["noise_keys"].tolist() == [0, 0, *make_noise_keys(7, 4), 0, 0]
    assert step.top_logprobs == 2


def test_a_step_that_depends_on_the_previous_one_leaves_its_tokens_to_the_ranks() -> None:
    row = scheduled(1, 1, (11, 12), 4, 1, sampling=SEEDED, output_token_ids=[21, 22])
    step = build(make_manifest(num_slots=3), "token_generation", row, depends_on_previous=True)
    assert step.depends_on_previous
    assert step.inputs["input_ids"].tolist() == [0, 0, 0], "not read"
    assert step.inputs["position_ids"].tolist() == [0, 4, 0]
    assert step.inputs["seq_ids"].tolist() == [3, 1, 3]
    assert step.inputs["noise_keys"].tolist() == [0, 0, *make_noise_keys(7, 5), 0, 0]


@pytest.mark.parametrize(
    ("mode", "flag", "names"), [("on_device", "tokens", set()), ("host", "logits", {"sampling_params", "noise_keys"})]
)
def test_only_inputs_of_the_executable_are_built_unless_the_executor_samples(
    mode: str, flag: str, names: set[str]
) -> None:
    manifest = make_manifest(flags=(flag,), sampling=msgspec.structs.replace(DYNAMIC, mode=mode))
    step = build(manifest, "token_generation", scheduled(1, 1, (11,), 1, 1, output_token_ids=[5]))
    assert set(step.inputs) == {"input_ids", "position_ids", "seq_ids"} | names


def test_a_prompt_that_ends_with_some_output_goes_on_with_its_draws() -> None:
    manifest = make_manifest(num_slots=1, prompt_buckets=(4,))
    output = scheduled(0, 0, (11, 12), 2, 1, sampling=SEEDED, output_token_ids=[21])
    prompt = scheduled(0, 0, (11, 12, 21), 0, 3, sampling=SEEDED)
    going_on = build(manifest, "token_generation", output).inputs["noise_keys"]
    begun = build(manifest, "context_encoding", prompt).inputs["noise_keys"]
    assert begun.tolist() == going_on[:2].tolist() == [*make_noise_keys(7, 3)]


OF_EARLIER_RELEASES = msgspec.structs.replace(DYNAMIC, chance="rand")


@pytest.mark.parametrize(("mode", "flag"), [("on_device", "tokens"), ("host", "logits")])
def test_bundle_of_an_earlier_release_gets_a_number_for_each_generated_token(mode: str, flag: str) -> None:
    sampling = msgspec.structs.replace(OF_EARLIER_RELEASES, mode=mode)
    manifest = make_manifest(num_slots=3, flags=("rand", "sampling_params", flag), sampling=sampling)
    row = scheduled(1, 1, (11, 12), 3, 1, sampling=SEEDED, output_token_ids=[21, 22])
    inputs = build(manifest, "token_generation", row).inputs
    assert inputs["rand"].tolist() == [0.5, uniform(7, 2), 0.5]
    assert "noise_keys" not in inputs


def test_manifest_of_an_earlier_release_says_nothing_of_noise() -> None:
    written = msgspec.json.encode(OF_EARLIER_RELEASES)
    assert b"chance" not in written
    assert msgspec.json.decode(written, type=Sampling) == OF_EARLIER_RELEASES


def test_deterministic_bundle_gets_one_half() -> None:
    sampling = msgspec.structs.replace(OF_EARLIER_RELEASES, deterministic=True)
    manifest = make_manifest(sampling=sampling, flags=("rand", "sampling_params", "tokens"))
    row = scheduled(0, 0, (11,), 0, 1, sampling=SEEDED)
    assert build(manifest, "context_encoding", row).inputs["rand"].tolist() == [0.5]


def make_processing(**options: Any) -> Manifest:
    """Each executable twice, with processors and without."""
    all_flags = (DYNAMIC_FLAGS, (PROCESSORS, "cuts", *DYNAMIC_FLAGS))
    plain, processing = (make_manifest(flags=flags, **options) for flags in all_flags)
    return msgspec.structs.replace(plain, executables=(*plain.executables, *processing.executables))


def test_steps_of_which_no_row_asks_for_it_change_no_logits() -> None:
    manifest = make_processing(num_slots=3)
    rows = [scheduled(0, 0, (5, 6), 1, 1), scheduled(1, 1, (5, 6), 1, 1, sampling=SamplingParams(top_k=5))]
    assert build(manifest, "token_generation", *rows).tag == "token_generation_16"
    # The first chunk of a prompt gives no token.
    chunk = scheduled(0, 0, (5, 6), 0, 1, sampling=SamplingParams(min_new_tokens=1))
    assert build(manifest, "context_encoding", chunk).tag == "context_encoding_8"


def test_rows_that_ask_for_it_have_their_pairs_masks_and_cuts() -> None:
    manifest = make_processing(num_slots=3)
    sampling = SamplingParams(repetition_penalty=2, logit_bias={40: 3.0}, min_p=0.25, min_new_tokens=1)
    rows = [
        scheduled(0, 0, (5, 6), 1, 1),
        scheduled(2, 2, (7, 8, 7), 2, 1, sampling=sampling, stop=(2,)),
    ]
    step = build(manifest, "token_generation", *rows)
    assert step.tag == "token_generation_16_processors"
    values = {
        name: [own[at : at + len(own) // 3] for at in range(0, len(own), len(own) // 3)]
        for name, own in list_values(step.inputs).items()
    }
    assert [row[:4] for row in values["pair_ids"]] == [[-1] * 4, [-1] * 4, [40, 7, 8, -1]]
    assert values["pair_bias"][2][:4] == [3.0, 0.0, 0.0, 0.0]
    assert values["pair_factor"][2][:4] == [1.0, 2.0, 2.0, 1.0]
    idle, plain, (first, *others) = values["token_bitmask"]
    assert set(idle) == set(plain) == set(others) == {-1}
    assert first == ~(1 << 2)
    assert values["cuts"] == [[0.0, 1.0], [0.0, 1.0], [0.25, 1.0]]


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
