"""What every executor makes of mutable weight sets. Derive a test class of this beside `ExecutorSuite`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch

from bundle.manifest import ADAPTER_WEIGHTS, MODEL_WEIGHTS
from execution.errors import EntryUnknown, WeightsAwaited, WeightSetNotMutable, WeightsInvalid
from execution.executors.executor import Executor, load_executor
from tests.contract.executors.executor_suite import CTE, Reference, prompt_inputs, write_faulty_weights
from tests.ranks.toy import VOCAB, WRITABLE, ToyBundle, make_model, make_writable, save_entry


def make_reference(seed: int, entries: Mapping[int, int]) -> Reference:
    """The toy of a seed whose mutable weights are zeros, but for entries, each of the seed that its token has."""
    reference = Reference(seed)
    for name in WRITABLE:
        tensor = reference.model.get_parameter(name)
        tensor.zero_()
        for token, other in entries.items():
            tensor[token] = make_model(other).get_parameter(name)[token]
    return reference


def assert_holds(executor: Executor, seed: int, entries: Mapping[int, int]) -> None:
    """The executor computes as `make_reference` says; overwrites slot 0."""
    inputs = prompt_inputs([7, 8], 0)
    torch.testing.assert_close(executor.run(CTE, inputs)["logits"], make_reference(seed, entries).run(inputs))


def spoil_header(path: Path) -> None:
    """Leaves a safetensors file that cannot be read, and looks unchanged."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class WriteSuite:
    @pytest.fixture
    def writable(self, toy_bundle: ToyBundle) -> Iterator[Executor]:
        executor = load_executor(make_writable(toy_bundle.manifest), 0, toy_bundle.blob_path)
        yield executor
        executor.close()

    def test_entries_are_zeros_until_they_are_written(self, writable: Executor, tmp_path: Path) -> None:
        path = tmp_path / "entry.safetensors"
        assert_holds(writable, 0, {})
        writable.write(ADAPTER_WEIGHTS, 7, save_entry(0, 7, path))
        assert_holds(writable, 0, {7: 0})
        path.unlink()
        writable.write(ADAPTER_WEIGHTS, 8, save_entry(1, 8, path))
        assert_holds(writable, 0, {7: 0, 8: 1})
        writable.write(ADAPTER_WEIGHTS, 7, save_entry(1, 7, tmp_path / "other.safetensors"))
        assert_holds(writable, 0, {7: 1, 8: 1})
        writable.write(ADAPTER_WEIGHTS, 8, None)
        assert_holds(writable, 0, {7: 1})

    def test_swaps_leave_entries(self, writable: Executor, toy_bundle: ToyBundle, tmp_path: Path) -> None:
        paths = [save_entry(0, token, tmp_path / f"{token}.safetensors") for token in range(9)]
        writable.write(ADAPTER_WEIGHTS, 7, paths[7])
        writable.stage_weights(toy_bundle.weights[1])
        writable.write(ADAPTER_WEIGHTS, 8, paths[8])
        assert_holds(writable, 0, {7: 0, 8: 0})
        writable.swap_weights()
        assert_holds(writable, 1, {7: 0, 8: 0})
        writable.write(ADAPTER_WEIGHTS, 8, None)
        assert_holds(writable, 1, {7: 0})
        writable.stage_weights(toy_bundle.weights[0])
        writable.discard_staged()
        assert_holds(writable, 1, {7: 0})
        writable.stage_weights(toy_bundle.weights[0])
        writable.swap_weights()
        writable.write(ADAPTER_WEIGHTS, 8, paths[8])
        assert_holds(writable, 0, {7: 0, 8: 0})

    def test_entries_that_are_written_before_the_first_weights(self, toy_bundle: ToyBundle, tmp_path: Path) -> None:
        manifest = make_writable(toy_bundle.manifest)
        model, mutable = manifest.weight_sets
        shards = tuple(msgspec.structs.replace(shard, blob=None, size_bytes=0) for shard in model.shards)
        weight_sets = (msgspec.structs.replace(model, shards=shards), mutable)
        executor = load_executor(msgspec.structs.replace(manifest, weight_sets=weight_sets), 0, toy_bundle.blob_path)
        executor.write(ADAPTER_WEIGHTS, 7, save_entry(0, 7, tmp_path / "entry.safetensors"))
        with pytest.raises(WeightsAwaited):
            executor.run(CTE, prompt_inputs([7, 8], 0))
        executor.stage_weights(toy_bundle.weights[1])
        executor.swap_weights()
        assert_holds(executor, 1, {7: 0})
        executor.close()

    @pytest.mark.parametrize("max_kept", [0, 1, 2])
    def test_files_that_stay_mapped_are_not_read_again(
        self, toy_bundle: ToyBundle, tmp_path: Path, max_kept: int
    ) -> None:
        manifest = make_writable(toy_bundle.manifest)
        serving = msgspec.structs.replace(manifest.serving, max_host_adapters=max_kept)
        executor = load_executor(msgspec.structs.replace(manifest, serving=serving), 0, toy_bundle.blob_path)
        paths = {token: save_entry(0, token, tmp_path / f"{token}.safetensors") for token in (6, 7, 8)}
        for token in (7, 6, 8, 7):
            executor.check(ADAPTER_WEIGHTS, token, paths[token])
        assert_holds(executor, 0, {})
        for path in paths.values():
            spoil_header(path)
        for token in (6, 8, 7)[: 3 - max_kept]:
            with pytest.raises(WeightsInvalid):
                executor.write(ADAPTER_WEIGHTS, token, paths[token])
        kept = (6, 8, 7)[3 - max_kept :]
        for token in kept:
            executor.write(ADAPTER_WEIGHTS, token, paths[token])
        assert_holds(executor, 0, dict.fromkeys(kept, 0))
        executor.close()

    def test_mutable_sets_count_as_weights(self, writable: Executor) -> None:
        assert writable.weights_bytes == sum(tensor.nbytes for tensor in make_model(0).state_dict().values())

    @pytest.mark.parametrize(
        ("weight_set", "index", "error", "message"),
        [
            ("nope", 0, WeightSetNotMutable, "weight_set: got 'nope'; accepted: mutable sets of the bundle: adapters"),
            (MODEL_WEIGHTS, 0, WeightSetNotMutable, "weight_set: got 'model'; accepted: mutable sets of the bundle: "),
            (ADAPTER_WEIGHTS, -1, EntryUnknown, r"weight_sets\[adapters\]\.index: got -1; accepted: 0 to 47"),
            (ADAPTER_WEIGHTS, VOCAB, EntryUnknown, r"weight_sets\[adapters\]\.index: got 48; accepted: 0 to 47"),
        ],
    )
    def test_entries_that_no_set_has(
        self, writable: Executor, tmp_path: Path, *, weight_set: str, index: int, error: type[Exception], message: str
    ) -> None:
        path = save_entry(0, 7, tmp_path / "entry.safetensors")
        writable.write(ADAPTER_WEIGHTS, 7, path)
        for call in (writable.check, writable.write):
            for each in (path, None):
                with pytest.raises(error, match=message):
                    call(weight_set, index, each)
        assert_holds(writable, 0, {7: 0})

    @pytest.mark.parametrize("fault", ["missing", "shape", "dtype", "truncated", "no safetensors", "absent"])
    def test_files_that_do_not_fit_change_nothing(self, writable: Executor, tmp_path: Path, fault: str) -> None:
        writable.write(ADAPTER_WEIGHTS, 7, save_entry(0, 7, tmp_path / "entry.safetensors"))
        good = save_entry(1, 7, tmp_path / "other.safetensors")
        faulty = write_faulty_weights(good, tmp_path / "faulty.safetensors", fault)
        for call in (writable.check, writable.write):
            with pytest.raises(WeightsInvalid, match=r"^the weight file of rank 0 does not fit: ") as caught:
                call(ADAPTER_WEIGHTS, 7, faulty)
            assert str(tmp_path) not in str(caught.value), "clients see it"
            got = {"missing": "nothing", "shape": "float32 [1]", "dtype": "bfloat16 []"}.get(fault)
            expected = [] if got is None else [f"tensors[head.bias]: got {got}; accepted: float32 []"]
            assert [str(violation) for violation in caught.value.violations] == expected
        assert_holds(writable, 0, {7: 0})
