"""Behaviour of every executor. Derive a test class, and give it a fixture `toy_bundle` of executables with logits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bundle.manifest import ConstantBinding, Executable, Manifest
from execution.errors import (
    ExecutableInvalid,
    ExecutableUnknown,
    SlotUnknown,
    StepFailed,
    StepInvalid,
    WeightsInvalid,
    WeightsNotStaged,
)
from execution.executors.arguments import make_tensors
from execution.executors.executor import Executor, load_executor
from execution.step import StepForm
from targets.cpu import AOTI, EXPORTED_PROGRAM
from tests.bundles.manifests import state_names
from tests.ranks.toy import (
    LAYERS,
    LENGTH,
    NUM_STATE,
    PROMPT,
    SLOTS,
    STATE_SHAPE,
    VOCAB,
    ToyBundle,
    describe_all,
    describe_toy,
    make_model,
)

CTE, TKG = f"context_encoding_{PROMPT}", f"token_generation_{LENGTH}"
STATE_BYTES = NUM_STATE * 4 * torch.Size(STATE_SHAPE).numel()


#: The toy without blobs.
TOY = describe_toy(describe_all("logits"), "logits")


def make_inputs(executable: Executable, *rows: tuple[int, list[int], int]) -> dict[str, Tensor]:
    """Inputs of the executable itself, without those of a host that samples.

    Args:
        rows: Of each row that is not idle, the slot, its tokens and the position of the first.
    """
    form = StepForm(TOY, executable)
    inputs = form.make_idle()
    for row, (slot, tokens, start) in enumerate(rows):
        form.put_tokens(inputs, row, tokens, start=start, blocks=(slot,))
    return make_tensors(executable.inputs, inputs)


def prompt_inputs(tokens: list[int], slot: int) -> dict[str, Tensor]:
    return make_inputs(TOY.executables[0], (slot, tokens, 0))


def token_inputs(tokens: list[int], positions: list[int], slots: list[int]) -> dict[str, Tensor]:
    rows = ((slot, [token], position) for token, position, slot in zip(tokens, positions, slots, strict=True))
    return make_inputs(TOY.executables[1], *rows)


class Reference:
    """The toy model itself, with a state of its own."""

    def __init__(self, seed: int) -> None:
        self.model = make_model(seed)
        self.state = [torch.zeros(STATE_SHAPE) for _ in range(NUM_STATE)]

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        logits, *self.state = self.model(*inputs.values(), *self.state)
        return logits


def assert_serves(executor: Executor, seed: int, *, with_old: bool = False) -> None:
    """The executor computes with the weights of `seed`; overwrites slot 0."""
    inputs = prompt_inputs([7, 8], 0)
    logits = executor.run(CTE, inputs, with_old=with_old)["logits"]
    torch.testing.assert_close(logits, Reference(seed).run(inputs))
    other = Reference(1 - seed).run(inputs)
    assert not torch.allclose(other, Reference(seed).run(inputs), atol=1e-2)


def with_executable(manifest: Manifest, **changes: object) -> Manifest:
    first, *others = manifest.executables
    return msgspec.structs.replace(manifest, executables=(msgspec.structs.replace(first, **changes), *others))


class ExecutorSuite:
    @pytest.fixture
    def executor(self, toy_bundle: ToyBundle) -> Iterator[Executor]:
        executor = load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
        yield executor
        executor.close()

    # Steps and state

    def test_steps_equal_the_model(self, executor: Executor) -> None:
        reference = Reference(0)
        steps = [
            (CTE, prompt_inputs([5, 6, 7], 0)),
            (CTE, prompt_inputs([9, 10, 11, 12, 13], 1)),
            (TKG, token_inputs([8, 14], [3, 5], [0, 1])),
            (TKG, token_inputs([9, 15], [4, 6], [0, 1])),
        ]
        for tag, inputs in steps:
            outputs = executor.run(tag, inputs)
            assert outputs.keys() == {"logits"}
            torch.testing.assert_close(outputs["logits"], reference.run(inputs))
        for name, expected in zip(state_names(LAYERS), reference.state, strict=True):
            torch.testing.assert_close(executor.read_state(name)[:SLOTS], expected[:SLOTS])

    def test_outputs_of_a_step_outlive_the_next_one(self, executor: Executor) -> None:
        first = executor.run(CTE, prompt_inputs([5], 0))["logits"]
        copy = first.clone()
        executor.run(CTE, prompt_inputs([6], 0))
        assert torch.equal(first, copy)

    def test_outputs_belong_to_the_caller_alone(self, executor: Executor) -> None:
        """Otherwise their memory is never freed: that of logits is large."""
        for tag, inputs in ((CTE, prompt_inputs([5], 0)), (TKG, token_inputs([8, 14], [3, 5], [0, 1]))):
            assert [output._use_count() for output in executor.run(tag, inputs).values()] == [1]

    def test_inputs_are_left_alone(self, executor: Executor) -> None:
        inputs = prompt_inputs([5, 6], 2)
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        executor.run(CTE, inputs)
        assert all(torch.equal(inputs[name], before[name]) for name in inputs)

    def test_idle_rows_write_the_scratch_slot_only(self, executor: Executor) -> None:
        executor.run(CTE, prompt_inputs([5, 6], 0))
        before = executor.read_state("k_cache.0")
        executor.run(TKG, token_inputs([7, 8], [2, 0], [0, SLOTS]))
        after = executor.read_state("k_cache.0")
        assert torch.equal(after[1:SLOTS], before[1:SLOTS])
        assert not torch.equal(after[0], before[0])
        assert not torch.equal(after[SLOTS], before[SLOTS])

    def test_zeroing_slots(self, executor: Executor) -> None:
        for slot in range(SLOTS):
            executor.run(CTE, prompt_inputs([5, 6], slot))
        assert executor.zero_state([0, 2, 2]) == STATE_BYTES // (SLOTS + 1) * 2
        for name in state_names(LAYERS):
            state = executor.read_state(name)
            assert not state[[0, 2]].any()
            assert state[1].any()
        assert executor.zero_state([]) == 0
        assert executor.zero_state(None) == STATE_BYTES
        assert not any(executor.read_state(name).any() for name in state_names(LAYERS))

    @pytest.mark.parametrize("slot", [-1, SLOTS + 1])
    def test_zeroing_an_unknown_slot_zeroes_nothing(self, executor: Executor, slot: int) -> None:
        executor.run(CTE, prompt_inputs([5, 6], 0))
        with pytest.raises(SlotUnknown, match=rf"slots: got {slot}; accepted: 0 to {SLOTS}"):
            executor.zero_state([0, slot])
        assert executor.read_state("k_cache.0")[0].any()

    def test_committing_the_state_keeps_it(self, executor: Executor) -> None:
        executor.run(CTE, prompt_inputs([5, 6], 1))
        before = {name: executor.read_state(name) for name in state_names(LAYERS)}
        executor.commit_state()
        assert all(torch.equal(executor.read_state(name), state) for name, state in before.items())

    def test_memory(self, executor: Executor) -> None:
        assert executor.state_bytes == STATE_BYTES
        assert executor.weights_bytes == sum(tensor.nbytes for tensor in make_model(0).state_dict().values())

    # Inputs that do not fit

    def test_unknown_tag(self, executor: Executor) -> None:
        with pytest.raises(ExecutableUnknown, match=f"no executable 'nope' in the bundle; it has {CTE}, {TKG}"):
            executor.run("nope", {})

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("num_tokens", None, "inputs: got input_ids, position_ids, seq_ids; accepted: .*num_tokens"),
            ("extra", torch.zeros(1), "inputs: got extra, "),
            ("seq_ids", torch.tensor([0]), r"inputs\[seq_ids\]: got int64 \[1\]; accepted: int32 \[1\]"),
            ("seq_ids", torch.tensor([[0]], dtype=torch.int32), r"got int32 \[1, 1\]; accepted: int32 \[1\]"),
            ("input_ids", torch.zeros(PROMPT, 2, dtype=torch.int32).T[:1], "not contiguous"),
            ("input_ids", torch.full((1, PROMPT), VOCAB, dtype=torch.int32), f"{VOCAB}; accepted: 0 to {VOCAB - 1}"),
            ("input_ids", torch.full((1, PROMPT), -1, dtype=torch.int32), "got -1; accepted: 0 to"),
            ("position_ids", torch.full((1, PROMPT), LENGTH, dtype=torch.int32), f"accepted: 0 to {LENGTH - 1}"),
            ("seq_ids", torch.tensor([SLOTS + 1], dtype=torch.int32), f"accepted: 0 to {SLOTS}"),
            ("num_tokens", torch.tensor([0], dtype=torch.int32), f"got 0; accepted: 1 to {PROMPT}"),
        ],
    )
    def test_inputs_that_do_not_fit(self, executor: Executor, name: str, value: Tensor | None, message: str) -> None:
        inputs = prompt_inputs([5, 6], 0)
        if value is None:
            del inputs[name]
        else:
            inputs[name] = value
        with pytest.raises(StepInvalid, match=message):
            executor.run(CTE, inputs)
        assert not executor.read_state("k_cache.0").any()

    # Weights

    def test_staged_weights_serve_after_the_swap(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        for seed in (1, 0, 1):
            assert_serves(executor, 1 - seed)
            executor.stage_weights(toy_bundle.weights[seed])
            assert_serves(executor, 1 - seed)
            executor.swap_weights()
            assert_serves(executor, seed)

    def test_a_swap_keeps_the_state(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        executor.run(CTE, prompt_inputs([5, 6], 1))
        before = executor.read_state("v_cache.1")
        executor.stage_weights(toy_bundle.weights[1])
        executor.swap_weights()
        assert torch.equal(executor.read_state("v_cache.1"), before)

    def test_weights_are_the_files_own_pages(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        def is_mapped(seed: int) -> bool:
            return str(toy_bundle.weights[seed]) in Path("/proc/self/maps").read_text()

        assert (is_mapped(0), is_mapped(1)) == (True, False)
        executor.stage_weights(toy_bundle.weights[1])
        assert (is_mapped(0), is_mapped(1)) == (True, True)
        executor.swap_weights()
        assert (is_mapped(0), is_mapped(1)) == (False, True)
        executor.close()
        assert (is_mapped(0), is_mapped(1)) == (False, False)

    def test_discarding(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        executor.discard_staged()
        executor.stage_weights(toy_bundle.weights[1])
        executor.discard_staged()
        with pytest.raises(WeightsNotStaged):
            executor.swap_weights()
        assert_serves(executor, 0)

    def test_old_weights_take_turns_with_the_new_ones(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        with pytest.raises(WeightsNotStaged):
            assert_serves(executor, 0, with_old=True)
        executor.stage_weights(toy_bundle.weights[1])
        executor.swap_weights(keeps_old=True)
        references = {seed: Reference(seed) for seed in (0, 1)}
        for seed, reference in references.items():
            inputs = prompt_inputs([5, 6, 7], seed)
            logits = executor.run(CTE, inputs, with_old=not seed)["logits"]
            torch.testing.assert_close(logits, reference.run(inputs))
        for position in range(3, 7):
            for seed, reference in references.items():
                # The other sequence has row 1 - seed and idles.
                slots = [SLOTS, SLOTS]
                slots[seed] = seed
                inputs = token_inputs([position, position], [position, position], slots)
                logits = executor.run(TKG, inputs, with_old=not seed)["logits"]
                torch.testing.assert_close(logits[seed], reference.run(inputs)[seed])
        executor.discard_staged()
        assert_serves(executor, 1)
        with pytest.raises(WeightsNotStaged):
            assert_serves(executor, 0, with_old=True)

    def test_kept_weights_come_back_without_their_file(
        self, executor: Executor, toy_bundle: ToyBundle, tmp_path: Path
    ) -> None:
        path = tmp_path / "weights.safetensors"
        shutil.copy(toy_bundle.weights[1], path)
        executor.stage_weights(path)
        executor.swap_weights(keeps_old=True)
        assert_serves(executor, 0, with_old=True)
        path.unlink()
        executor.swap_weights(keeps_old=True)
        assert_serves(executor, 0)
        assert_serves(executor, 1, with_old=True)
        executor.swap_weights()
        assert_serves(executor, 1)
        with pytest.raises(WeightsNotStaged):
            executor.swap_weights()

    def test_staging_replaces_kept_weights(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        executor.stage_weights(toy_bundle.weights[1])
        executor.swap_weights(keeps_old=True)
        assert_serves(executor, 0, with_old=True)
        executor.stage_weights(toy_bundle.weights[1])
        assert_serves(executor, 1)
        executor.swap_weights()
        assert_serves(executor, 1)

    def test_staging_again_replaces(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        executor.stage_weights(toy_bundle.weights[1])
        executor.stage_weights(toy_bundle.weights[0])
        executor.swap_weights()
        assert_serves(executor, 0)

    @pytest.mark.parametrize("fault", ["missing", "shape", "dtype", "truncated", "no safetensors", "absent"])
    def test_weights_that_do_not_fit_change_nothing(
        self, executor: Executor, toy_bundle: ToyBundle, tmp_path: Path, fault: str
    ) -> None:
        path = write_faulty_weights(toy_bundle.weights[1], tmp_path / "weights.safetensors", fault)
        executor.stage_weights(toy_bundle.weights[1])
        with pytest.raises(WeightsInvalid) as caught:
            executor.stage_weights(path)
        assert str(caught.value).startswith("the weight file of rank 0 does not fit: ")
        assert str(tmp_path) not in str(caught.value), "clients see it"
        expected = {
            "missing": ["tensors[head.bias]: got nothing; accepted: float32 [48]"],
            "shape": ["tensors[head.bias]: got float32 [1, 48]; accepted: float32 [48]"],
            "dtype": ["tensors[head.bias]: got bfloat16 [48]; accepted: float32 [48]"],
        }
        assert [str(violation) for violation in caught.value.violations] == expected.get(fault, [])
        assert_serves(executor, 0)
        executor.swap_weights()
        assert_serves(executor, 1)

    # Bundles that do not fit

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"state": state_names(LAYERS)[:-1]}, "the manifest has"),
            ({"outputs": ()}, "the manifest has"),
            ({"constants": ()}, "constant embedding.weight is bound to no weight"),
        ],
        ids=["state", "outputs", "constants"],
    )
    def test_manifests_that_do_not_fit(self, toy_bundle: ToyBundle, changes: dict[str, object], message: str) -> None:
        manifest = with_executable(toy_bundle.manifest, **changes)
        with pytest.raises(ExecutableInvalid, match=f"executable {CTE} cannot be loaded: .*{message}"):
            load_executor(manifest, 0, toy_bundle.blob_path)

    def test_bindings_to_no_weight(self, toy_bundle: ToyBundle) -> None:
        bindings = rebind(toy_bundle.manifest.executables[0], "head.bias", "head.nothing")
        with pytest.raises(ExecutableInvalid, match=r"constant head\.bias is bound to model/head\.nothing"):
            load_executor(with_executable(toy_bundle.manifest, constants=bindings), 0, toy_bundle.blob_path)

    def test_state_of_another_shape(self, toy_bundle: ToyBundle) -> None:
        layout = toy_bundle.manifest.state
        shorter = tuple(msgspec.structs.replace(one, shape=(SLOTS + 1, 1, LENGTH - 1, 16)) for one in layout.tensors)
        manifest = msgspec.structs.replace(toy_bundle.manifest, state=msgspec.structs.replace(layout, tensors=shorter))
        executor = load_executor(manifest, 0, toy_bundle.blob_path)
        with pytest.raises(StepFailed, match=f"^step of {CTE} failed: the log of its rank says why$"):
            executor.run(CTE, prompt_inputs([5, 6], 0))
        executor.close()

    def test_bundles_of_two_formats(self, toy_bundle: ToyBundle) -> None:
        own = toy_bundle.manifest.executables[0].format
        other = next(one.name for one in (AOTI, EXPORTED_PROGRAM) if one.name != own)
        with pytest.raises(ExecutableInvalid, match=f"executable {TKG} cannot be loaded: it is .* in a bundle of"):
            load_executor(with_executable(toy_bundle.manifest, format=other), 0, toy_bundle.blob_path)

    @pytest.mark.parametrize("content", [None, b"", b"\x7fELF and then nothing"], ids=["absent", "empty", "garbage"])
    def test_blobs_that_are_no_executables(self, toy_bundle: ToyBundle, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "blob"
        if content is not None:
            path.write_bytes(content)
        blobs = toy_bundle.blobs | {toy_bundle.manifest.executables[1].blob: path}
        with pytest.raises(ExecutableInvalid, match=f"executable {TKG} cannot be loaded") as caught:
            load_executor(toy_bundle.manifest, 0, blobs.__getitem__)
        assert str(tmp_path) not in str(caught.value), "clients see it"

    def test_weight_files_that_are_none(self, toy_bundle: ToyBundle, tmp_path: Path) -> None:
        blobs = toy_bundle.blobs | {toy_bundle.manifest.weight_sets[0].shards[0].blob: tmp_path / "absent"}
        with pytest.raises(WeightsInvalid, match="FileNotFoundError"):
            load_executor(toy_bundle.manifest, 0, blobs.__getitem__)


def rebind(executable: Executable, constant: str, tensor: str) -> tuple[ConstantBinding, ...]:
    return tuple(
        msgspec.structs.replace(binding, tensor=tensor) if binding.name == constant else binding
        for binding in executable.constants
    )


def write_faulty_weights(good: Path, path: Path, fault: str) -> Path:
    tensors = load_file(good)
    if fault == "absent":
        return path
    if fault == "no safetensors":
        path.write_text("these are no weights")
    elif fault == "truncated":
        shutil.copy(good, path)
        with path.open("rb+") as file:
            file.truncate(good.stat().st_size - 100)
    else:
        bias = tensors.pop("head.bias")
        if fault != "missing":
            tensors["head.bias"] = bias[None] if fault == "shape" else bias.bfloat16()
        save_file(tensors, path)
    return path
