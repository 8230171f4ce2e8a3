from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bundle.abi.outputs import INVALID_ROW, NO_TOKEN
from bundle.manifest import Manifest, TensorSpec
from execution.errors import StepInvalid
from execution.ranks.step_memory import Region, StepLayout, StepMemory
from execution.step import MAX_TOP_LOGPROBS, ProcessedRow, Step, StepForm, StepInputs, step_inputs
from tests.bundles.manifests import VOCAB_SIZE, make_manifest
from tests.memory_files import count_held
from tests.ranks.step_values import make_inputs
from tests.ranks.toy import VOCAB
from tests.ranks.toy_bundles import MakeToy

TKG = "token_generation_16"
VALUES = st.one_of(
    st.builds(array, st.sampled_from("iq"), st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4)),
    st.builds(array, st.sampled_from("fd"), st.lists(st.floats(width=32), max_size=4)),
)


@pytest.fixture
def manifest(toy: MakeToy) -> Manifest:
    return toy("logits", 0).manifest


@pytest.fixture
def memory(manifest: Manifest) -> Iterator[StepMemory]:
    memory = StepMemory(manifest)
    yield memory
    memory.close()


def decode_inputs() -> StepInputs:
    return make_inputs(
        {
            "input_ids": [3, 4],
            "position_ids": [0, 1],
            "seq_ids": [0, 1],
            "sampling_params": [1.0, 1.0, 1.0, 0.0, 0.5, 0.25],
            "noise_keys": [5, -6, 1 << 30, 8],
        }
    )


def regions_of(layout: StepLayout) -> list[Region]:
    return [
        region
        for steps in layout.sets
        for step in steps.values()
        for region in (*step.inputs.values(), step.tokens, step.logprobs, step.top_ids, step.top_logprobs, step.logits)
        if region is not None
    ]


def test_regions_are_aligned_apart_and_inside(manifest: Manifest) -> None:
    layout = StepLayout.of(manifest)
    regions = sorted(regions_of(layout), key=lambda region: region.offset)
    assert all(region.offset % 64 == 0 for region in regions)
    assert all(before.end <= after.offset for before, after in itertools.pairwise(regions))
    assert regions[-1].end == layout.size_bytes


def test_host_sampling_adds_its_inputs(manifest: Manifest) -> None:
    executable = manifest.executables[1]
    names = [spec.name for spec in step_inputs(executable, manifest.sampling)]
    assert names == ["input_ids", "position_ids", "seq_ids", "sampling_params", "noise_keys"]
    on_device = msgspec.structs.replace(manifest.sampling, mode="on_device")
    assert step_inputs(executable, on_device) == executable.inputs


def test_top_logprobs_are_no_more_than_the_vocabulary(manifest: Manifest) -> None:
    small = msgspec.structs.replace(manifest, tokens=msgspec.structs.replace(manifest.tokens, vocab_size=7))
    assert StepLayout.of(small).sets[0][TKG].top_ids.shape == (2, 7)
    assert StepLayout.of(manifest).sets[0][TKG].top_ids.shape == (2, MAX_TOP_LOGPROBS)


def test_results_are_read_from_where_the_layout_says(manifest: Manifest, memory: StepMemory) -> None:
    regions = StepLayout.of(manifest).sets[1][TKG]
    width = regions.top_ids.shape[1]
    for region, values in (
        (regions.tokens, [7, 8]),
        (regions.logprobs, [-0.5, -0.25]),
        (regions.top_ids, [*range(width), *range(100, 100 + width)]),
        (regions.top_logprobs, [-float(value) for value in range(2 * width)]),
    ):
        memory._view(region)[:] = array(region.format, values)
    plain = memory.read_result(Step(TKG, {}), 1, 0.5)
    assert (plain.tokens, plain.logprobs, plain.top_ids, plain.top_logprobs) == ([[7], [8]], None, None, None)
    zero = memory.read_result(Step(TKG, {}, 0), 1, 0.5)
    assert (zero.logprobs, zero.top_ids, zero.top_logprobs) == ([[-0.5], [-0.25]], [[[]], [[]]], [[[]], [[]]])
    two = memory.read_result(Step(TKG, {}, 2), 1, 0.5)
    assert two.top_ids == [[[0, 1]], [[100, 101]]]
    assert two.top_logprobs == [[[-0.0, -1.0]], [[-float(width), -float(width + 1)]]]


def test_a_step_that_gives_several_tokens_has_room_for_all(manifest: Manifest) -> None:
    executable = manifest.executables[1]
    tokens = TensorSpec(name="tokens", dtype="int32", shape=(2, 3))
    verifying = msgspec.structs.replace(executable, outputs=(tokens, *executable.outputs))
    memory = StepMemory(msgspec.structs.replace(manifest, executables=(verifying,)))
    memory._token_views[0][TKG][:] = array("i", [5, 6, NO_TOKEN, INVALID_ROW, NO_TOKEN, NO_TOKEN])
    regions = memory._layout.sets[0][TKG]
    memory._view(regions.logprobs)[:] = array("f", range(6))
    memory._view(regions.top_ids)[:] = array("i", range(6 * regions.top_ids.shape[-1]))
    result = memory.read_result(Step(TKG, {}, 1), 0, 0.5)
    memory.close()
    assert (result.tokens, result.invalid_rows) == ([[5, 6], []], (1,))
    assert result.logprobs == [[0, 1, 2], [3, 4, 5]]
    width = regions.top_ids.shape[-1]
    assert result.top_ids == [[[0], [width], [2 * width]], [[3 * width], [4 * width], [5 * width]]]


def test_logits_keep_their_shape(manifest: Manifest, memory: StepMemory) -> None:
    region = StepLayout.of(manifest).sets[1][TKG].logits
    assert region is not None
    assert region.shape == (2, VOCAB)
    memory._view(region)[:] = array("f", range(2 * VOCAB))
    logits = memory.read_result(Step(TKG, {}, return_logits=True), 1, 0.5).logits
    assert logits is not None
    assert logits.shape == (2, VOCAB)
    assert logits[1, 2] == VOCAB + 2
    assert memory.read_result(Step(TKG, {}), 1, 0.5).logits is None


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_internal_outputs_have_room_only_if_asked_for(tp_degree: int) -> None:
    """A runtime counts the layout as memory of a deployment."""
    plain, internal = (
        make_manifest(flags=(*flags, "noise_keys", "sampling_params", "tokens"), tp_degree=tp_degree)
        for flags in ((), ("rank_logits",))
    )
    assert StepLayout.of(internal).size_bytes == StepLayout.of(plain).size_bytes
    memory = StepMemory(internal, with_internal=True)
    region = StepLayout.of(internal, with_internal=True).sets[1][TKG].internal["rank_logits"]
    assert region.shape == (tp_degree, 4, VOCAB_SIZE)
    memory._view(region)[:] = array("f", range(tp_degree * 4 * VOCAB_SIZE))
    result = memory.read_result(Step(TKG, {}), 1, 0.5)
    assert result.internal["rank_logits"][tp_degree - 1, 0, 5] == 4 * VOCAB_SIZE * (tp_degree - 1) + 5
    assert result.logits is None
    (executable,) = (one for one in internal.executables if one.tag == TKG)
    idle = StepForm(internal, executable).make_idle()
    with pytest.raises(StepInvalid, match="accepted: false: the executable returns no logits"):
        memory.write_inputs(Step(TKG, idle, return_logits=True), 0)
    memory.close()


def test_inputs_lie_where_the_layout_says(manifest: Manifest, memory: StepMemory) -> None:
    others = decode_inputs() | {"input_ids": array("i", [5, 6])}
    for memory_set, inputs in enumerate((decode_inputs(), others)):
        memory.write_inputs(Step(TKG, inputs), memory_set)
    for steps, inputs in zip(StepLayout.of(manifest).sets, (decode_inputs(), others), strict=True):
        for name, region in steps[TKG].inputs.items():
            assert memory._view(region).tolist() == inputs[name].tolist()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("input_ids", None, "inputs: got noise_keys, position_ids, sampling_params, seq_ids; accepted: input_ids, "),
        ("other", array("i", [1]), "inputs: got input_ids, noise_keys, other, "),
        (
            "input_ids",
            array("i", [1]),
            r"inputs\[input_ids\]: got 1 values of the array type 'i'; accepted: 2 int32 values",
        ),
        ("input_ids", array("i", [1, 2, 3]), "accepted: 2 int32 values"),
        ("input_ids", array("f", [1, 2]), "accepted: 2 int32 values"),
        ("sampling_params", array("d", [0.5] * 6), "accepted: 6 float32 values"),
    ],
)
def test_steps_that_do_not_fit(memory: StepMemory, name: str, values: array[Any] | None, message: str) -> None:
    inputs = decode_inputs()
    if values is None:
        del inputs[name]
    else:
        inputs[name] = values
    with pytest.raises(StepInvalid, match=message):
        memory.write_inputs(Step(TKG, inputs), 0)


@pytest.mark.parametrize("asked", [-1, MAX_TOP_LOGPROBS + 1])
def test_too_many_top_logprobs(memory: StepMemory, asked: int) -> None:
    with pytest.raises(StepInvalid, match=f"top_logprobs: got {asked}; accepted: 0 to {MAX_TOP_LOGPROBS}"):
        memory.write_inputs(Step(TKG, decode_inputs(), asked), 0)


def test_logprobs_without_logits(manifest: Manifest) -> None:
    silent = tuple(msgspec.structs.replace(executable, outputs=()) for executable in manifest.executables)
    memory = StepMemory(msgspec.structs.replace(manifest, executables=silent))
    with pytest.raises(StepInvalid, match="top_logprobs: got 0; accepted: none: the executable returns no logits"):
        memory.write_inputs(Step(TKG, decode_inputs(), 0), 0)
    with pytest.raises(StepInvalid, match="return_logits: got true; accepted: false: the executable returns no logits"):
        memory.write_inputs(Step(TKG, decode_inputs(), return_logits=True), 0)
    memory.close()


@pytest.mark.parametrize("asked", [{"processed": (ProcessedRow(0, cuts=(0.5, 1.0)),)}, {"left": (0,)}])
@pytest.mark.parametrize("flags", [("logits",), ("rank_logits",), ()])
def test_ranks_pick_tokens_only_where_executables_leave_logits(
    flags: tuple[str, ...], asked: dict[str, tuple[Any, ...]]
) -> None:
    manifest = make_manifest(flags=(*flags, "noise_keys", "sampling_params", "tokens"))
    memory = StepMemory(manifest)
    (executable,) = (one for one in manifest.executables if one.tag == TKG)
    inputs = StepForm(manifest, executable).make_idle()
    step = Step(TKG, inputs, **asked)
    if flags:
        memory.write_inputs(step, 0)
    else:
        (name,) = asked
        with pytest.raises(StepInvalid, match=f"{name}: got 1 rows; accepted: none: the executable leaves no logits"):
            memory.write_inputs(step, 0)
    memory.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(("input_ids", "sampling_params")), values=VALUES)
def test_no_values_break_more_than_the_step(memory: StepMemory, name: str, values: array[Any]) -> None:
    try:
        memory.write_inputs(Step(TKG, decode_inputs() | {name: values}), 0)
    except StepInvalid:
        return
    written = memory._view(memory._regions(TKG, 0).inputs[name]).tolist()
    assert written == pytest.approx(values.tolist(), nan_ok=True)


def test_closed_memory_goes_back_to_the_host_though_an_error_keeps_the_object(manifest: Manifest) -> None:
    before = count_held("kiln-steps")
    memory = StepMemory(manifest)
    assert count_held("kiln-steps") > before
    memory.close()
    assert count_held("kiln-steps") == before
    # A step that comes too late finds ranks that have ended, and writes nothing.
    memory.write_inputs(Step(TKG, decode_inputs()), 0)
