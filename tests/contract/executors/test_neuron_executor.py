"""The executor of NEFFs on a stand-in for libnrt: no NeuronCore has run it."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bundle.errors import KilnError
from bundle.manifest import ADAPTER_WEIGHTS, Manifest, Target
from execution.device_errors import DeviceBroken, DeviceBusy, DeviceHung, DeviceMemoryShort, DeviceUnsuitable
from execution.errors import ExecutableInvalid, StepFailed, WeightsAwaited, WeightsNotStaged
from execution.executors.executor import Executor, load_executor
from execution.executors.neuron.device import NeuronDevice, open_device
from tests.contract.executors.executor_suite import (
    CTE,
    STATE_BYTES,
    TKG,
    ExecutorSuite,
    Reference,
    assert_serves,
    prompt_inputs,
    token_inputs,
)
from tests.contract.executors.write_suite import WriteSuite
from tests.hang_guard import HANG_S
from tests.neuron.host import Faults
from tests.neuron.toys import write_neff
from tests.ranks.toy import LENGTH, SLOTS, ToyBundle, make_model, make_writable, save_entry, save_shard

WEIGHTS_BYTES = sum(tensor.nbytes for tensor in make_model(0).state_dict().values())


@pytest.fixture
def toy_bundle(neuron_process: Path, neuron_toy: ToyBundle) -> ToyBundle:
    return neuron_toy


@pytest.fixture
def device(toy_bundle: ToyBundle) -> NeuronDevice:
    return open_device(toy_bundle.manifest.target)


@pytest.fixture
def executor(toy_bundle: ToyBundle) -> Iterator[Executor]:
    executor = load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
    yield executor
    executor.close()


def used_bytes(device: NeuronDevice) -> int:
    stats = device.read_memory()
    assert stats is not None
    return int(stats.bytes_used)


def replace_first(bundle: ToyBundle, path: Path, **fields: int) -> tuple[Manifest, dict[str, Path]]:
    """The bundle with another file of the first NEFF, whose header is otherwise."""
    first, *others = bundle.manifest.executables
    changed = write_neff(first, path, **fields)
    return msgspec.structs.replace(bundle.manifest, executables=(changed, *others)), bundle.blobs | {changed.blob: path}


class TestNeuronExecutor(ExecutorSuite, WriteSuite):
    def test_weights_are_the_files_own_pages(self, executor: Executor, toy_bundle: ToyBundle) -> None:
        """Here they are not: they lie in the core's memory, and no file stays mapped."""
        executor.stage_weights(toy_bundle.weights[1])
        maps = Path("/proc/self/maps").read_text()
        assert not [path for path in toy_bundle.weights.values() if str(path) in maps]

    def test_state_of_another_shape(self, toy_bundle: ToyBundle) -> None:
        """Already the load refuses it: a NEFF states the shapes of its tensors."""
        layout = toy_bundle.manifest.state
        shorter = tuple(msgspec.structs.replace(one, shape=(SLOTS + 1, 1, LENGTH - 1, 16)) for one in layout.tensors)
        state = msgspec.structs.replace(layout, tensors=shorter)
        manifest = msgspec.structs.replace(toy_bundle.manifest, state=state)
        message = r"input15\] is float32 \[4, 1, 16, 16\]; accepted: float32 \[4, 1, 15"
        with pytest.raises(ExecutableInvalid, match=message):
            load_executor(manifest, 0, toy_bundle.blob_path)


def test_programs_share_state_and_weights(executor: Executor, device: NeuronDevice, toy_bundle: ToyBundle) -> None:
    """Two programs with copies of their own would hold twice as much."""
    before = used_bytes(device)
    second = load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
    held = used_bytes(device) - before
    assert STATE_BYTES + WEIGHTS_BYTES < held < 2 * (STATE_BYTES + WEIGHTS_BYTES)
    second.close()
    assert used_bytes(device) == before


def test_swaps_under_steps_leak_nothing(executor: Executor, device: NeuronDevice, toy_bundle: ToyBundle) -> None:
    references = [Reference(seed) for seed in (0, 1)]
    executor.run(CTE, prompt_inputs([5, 6, 7], 1))
    kept = executor.read_state("k_cache.0")[1]
    before = used_bytes(device)
    expected = [reference.run(prompt_inputs([9], 0)) for reference in references]
    for number in range(200):
        seed = (number + 1) % 2
        executor.stage_weights(toy_bundle.weights[seed])
        logits = executor.run(CTE, prompt_inputs([9], 0))["logits"]
        torch.testing.assert_close(logits, expected[1 - seed])
        executor.swap_weights()
        torch.testing.assert_close(executor.run(CTE, prompt_inputs([9], 0))["logits"], expected[seed])
        assert used_bytes(device) == before
    assert torch.equal(executor.read_state("k_cache.0")[1], kept)


def test_failed_loads_leave_nothing_on_the_core(
    device: NeuronDevice, toy_bundle: ToyBundle, tmp_path: Path, faults: Faults
) -> None:
    before, manifest = used_bytes(device), make_writable(toy_bundle.manifest)
    for call in ("load", "tensor_allocate", "tensor_write", "tensor_memset", "add_tensor_to_tensor_set"):
        faults.set(f"nrt_{call}", 4)
        with pytest.raises(DeviceMemoryShort):
            load_executor(manifest, 0, toy_bundle.blob_path)
        assert used_bytes(device) == before
    faults.clear()
    load_executor(manifest, 0, toy_bundle.blob_path).close()
    assert used_bytes(device) == before


def test_write_that_the_library_fails_is_named(toy_bundle: ToyBundle, faults: Faults, tmp_path: Path) -> None:
    executor = load_executor(make_writable(toy_bundle.manifest), 0, toy_bundle.blob_path)
    for call, path in (("write", save_entry(0, 7, tmp_path / "entry.safetensors")), ("memset", None)):
        faults.set(f"nrt_tensor_{call}", 1)
        with pytest.raises(KilnError, match=rf"nrt_tensor_{call} failed: NRT_FAILURE \(1\)"):
            executor.write(ADAPTER_WEIGHTS, 7, path)
    executor.close()


class TestMemory:
    def test_load_that_does_not_fit_says_what_is_missing(
        self, device: NeuronDevice, toy_bundle: ToyBundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = used_bytes(device)
        monkeypatch.setenv("NEURON_STAND_IN_HBM_BYTES", str(before + WEIGHTS_BYTES - 100))
        with pytest.raises(DeviceMemoryShort, match=f"weights of model: {WEIGHTS_BYTES} bytes are needed") as caught:
            load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
        assert caught.value.metadata["missing_bytes"] == "100"
        monkeypatch.setenv("NEURON_STAND_IN_HBM_BYTES", str(before + WEIGHTS_BYTES + STATE_BYTES - 7))
        with pytest.raises(DeviceMemoryShort, match=r"the KV cache: .* bytes are free, 7 are missing"):
            load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
        assert used_bytes(device) == before

    def test_load_without_statistics_is_noted(
        self,
        device: NeuronDevice,
        toy_bundle: ToyBundle,
        faults: Faults,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """They are advice: memory that is short is still refused, when it is allocated."""
        before = used_bytes(device)
        faults.set("nrt_get_vnc_memory_stats", 1)
        executor = load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
        assert_serves(executor, 0)
        executor.close()
        assert "nrt_get_vnc_memory_stats failed: NRT_FAILURE (1); memory is not checked in advance" in caplog.text
        monkeypatch.setenv("NEURON_STAND_IN_HBM_BYTES", str(before + WEIGHTS_BYTES - 100))
        with pytest.raises(DeviceMemoryShort, match=r"\d+ bytes are needed, how much is free is unknown"):
            load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
        faults.clear()
        assert used_bytes(device) == before

    def test_staging_that_does_not_fit_changes_nothing(
        self, executor: Executor, device: NeuronDevice, toy_bundle: ToyBundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = used_bytes(device)
        monkeypatch.setenv("NEURON_STAND_IN_HBM_BYTES", str(before + WEIGHTS_BYTES - 1))
        with pytest.raises(DeviceMemoryShort, match="1 are missing"):
            executor.stage_weights(toy_bundle.weights[1])
        assert used_bytes(device) == before
        with pytest.raises(WeightsNotStaged):
            executor.swap_weights()
        assert_serves(executor, 0)

    def test_the_core_never_holds_three_sets_of_weights(
        self, executor: Executor, device: NeuronDevice, toy_bundle: ToyBundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor.stage_weights(toy_bundle.weights[0])
        monkeypatch.setenv("NEURON_STAND_IN_HBM_BYTES", str(used_bytes(device)))
        executor.stage_weights(toy_bundle.weights[1])
        executor.swap_weights()
        assert_serves(executor, 1)


class TestStatuses:
    """Faults are calls and the statuses that each ends with in turn."""

    @pytest.mark.parametrize(
        ("fault", "error", "message"),
        [
            ("nrt_execute 1 2 7 1002 1005 1006", StepFailed, rf"step of {CTE} failed: NRT_\w+ \({{}}\)"),
            ("nrt_execute 4", StepFailed, f"step of {CTE} failed: the core has no memory for nrt_execute"),
            ("nrt_tensor_write 1", StepFailed, rf"step of {CTE} failed: NRT_FAILURE \({{}}\)"),
            ("nrt_tensor_read 1", StepFailed, rf"step of {CTE} failed: NRT_FAILURE \({{}}\)"),
            ("nrt_execute 5 1200", DeviceHung, r"nrt_execute ended with NRT_\w+ \({}\)"),
            ("nrt_execute 6 101 1004 1201 1202 1203 1204 1205 1206", DeviceBroken, r"reset: .* with NRT_\w+ \({}\)"),
        ],
    )
    def test_steps(self, executor: Executor, faults: Faults, fault: str, error: type[KilnError], message: str) -> None:
        call, *statuses = fault.split()
        for status in statuses:
            faults.set(call, status)
            with pytest.raises(error, match=message.format(status)):
                executor.run(CTE, prompt_inputs([5], 0))
            faults.clear()
            if error is StepFailed:
                assert_serves(executor, 0)

    @pytest.mark.parametrize(
        ("fault", "error", "message"),
        [
            ("nrt_load 4", DeviceMemoryShort, r"no memory for nrt_load: more is needed, \d+ bytes are free"),
            ("nrt_load 7 1005", DeviceBusy, r"\({}\)"),
            ("nrt_load 9 10", DeviceUnsuitable, r"executables: got NRT_\w+ \({}\)"),
        ],
    )
    def test_loads(self, toy_bundle: ToyBundle, faults: Faults, fault: str, error: Any, message: str) -> None:
        call, *statuses = fault.split()
        for status in statuses:
            faults.set(call, status)
            with pytest.raises(error, match=message.format(status)) as caught:
                load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
            assert not isinstance(caught.value, DeviceBusy) or caught.value.retry_after_s

    def test_row_without_numbers_fails_no_other(
        self, executor: Executor, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """NRT_EXEC_COMPLETED_WITH_NUM_ERR comes with outputs."""
        poison, model = 9, make_model(0)
        inputs = token_inputs([7, poison], [0, 0], [0, 1])
        numbers = executor.run(TKG, inputs)["logits"]
        model.embedding.weight[poison] = float("nan")
        executor.stage_weights(save_shard(model, 0, 1, tmp_path / "poisoned.safetensors"))
        executor.swap_weights()
        with caplog.at_level(logging.WARNING):
            first, second = executor.run(TKG, inputs)["logits"]
        torch.testing.assert_close(first, numbers[0])
        assert second.isnan().any()
        assert f"{TKG}: 1 steps so far had outputs without numbers" in caplog.text

    def test_bundle_without_weights_awaits_them(self, toy_bundle: ToyBundle) -> None:
        (model,) = toy_bundle.manifest.weight_sets
        shards = tuple(msgspec.structs.replace(shard, blob=None, size_bytes=0) for shard in model.shards)
        manifest = msgspec.structs.replace(
            toy_bundle.manifest, weight_sets=(msgspec.structs.replace(model, shards=shards),)
        )
        executor = load_executor(manifest, 0, toy_bundle.blob_path)
        with pytest.raises(WeightsAwaited):
            executor.run(CTE, prompt_inputs([5], 0))
        executor.stage_weights(toy_bundle.weights[1])
        executor.swap_weights()
        assert_serves(executor, 1)
        executor.close()


class TestBundlesForOtherCores:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"lnc_size": 1}, "lnc_size: got 1; accepted: 2, as target.lnc says"),
            ({"header_size": 512}, "header_size: got 512; accepted: 1024"),
            ({"data_size": 7}, "data_size: got 7; accepted: "),
        ],
    )
    def test_neffs_with_other_headers(
        self, toy_bundle: ToyBundle, tmp_path: Path, fields: dict[str, int], message: str
    ) -> None:
        manifest, blobs = replace_first(toy_bundle, tmp_path / "other.neff", **fields)
        with pytest.raises(ExecutableInvalid, match=message):
            load_executor(manifest, 0, blobs.__getitem__)

    def test_neff_of_a_version_that_the_library_lacks(self, toy_bundle: ToyBundle, tmp_path: Path) -> None:
        manifest, blobs = replace_first(toy_bundle, tmp_path / "other.neff", neff_version_major=3)
        with pytest.raises(DeviceUnsuitable, match=r"got NRT_UNSUPPORTED_NEFF_VERSION \(10\)"):
            load_executor(manifest, 0, blobs.__getitem__)

    def test_neff_of_other_tensors_than_the_manifests(self, toy_bundle: ToyBundle) -> None:
        first, second = toy_bundle.manifest.executables
        swapped = (msgspec.structs.replace(first, blob=second.blob), second)
        manifest = msgspec.structs.replace(toy_bundle.manifest, executables=swapped)
        message = r"tensor input0 of the NEFF is input int32 \[2, 1\] of 8 bytes, the manifest"
        with pytest.raises(ExecutableInvalid, match=message):
            load_executor(manifest, 0, toy_bundle.blob_path)

    @pytest.mark.parametrize(
        ("variable", "told"),
        [("NEURON_STAND_IN_INTEGERS", r"input int32 \[\d+, \d+\]"), ("NEURON_STAND_IN_FLAT", r"input \w+ \[\d+\]")],
    )
    def test_tensors_of_as_many_bytes_are_noted(
        self,
        toy_bundle: ToyBundle,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        *,
        variable: str,
        told: str,
    ) -> None:
        """libnrt does not report the original dtype of every tensor."""
        monkeypatch.setenv(variable, "1")
        executor = load_executor(toy_bundle.manifest, 0, toy_bundle.blob_path)
        assert_serves(executor, 0)
        executor.close()
        assert re.search(rf"{CTE}: libnrt reports another dtype or shape .*: tensor \w+ is {told} of", caplog.text)
        assert len(caplog.records) == len(toy_bundle.manifest.executables)

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (Target(kind="trn1", isa="", architecture="sunda", lnc=1), r"target\.kind: got trn1; accepted: trn2"),
            (Target(kind="trn2", isa="", architecture="cayman", lnc=1), r"target\.lnc: got 1; accepted: 2, as NEURON_"),
        ],
    )
    def test_bundle_for_other_cores_is_refused_by_field(
        self, device: NeuronDevice, toy_bundle: ToyBundle, target: Target, message: str
    ) -> None:
        before = used_bytes(device)
        with pytest.raises(DeviceUnsuitable, match=message):
            load_executor(msgspec.structs.replace(toy_bundle.manifest, target=target), 0, toy_bundle.blob_path)
        assert used_bytes(device) == before


@pytest.mark.parametrize(
    ("max_length", "flags", "given", "expected"),
    [
        (32_767, (), {}, ("30", None)),
        (32_768, ("--lnc=2", "--hbm-scratchpad-page-size=1024"), {}, ("600", "1024")),
        (64, ("--hbm-scratchpad-page-size=512",), {}, ("30", "512")),
        (64, ("--hbm-scratchpad-page-size=all",), {}, ("30", None)),
        (
            *(65_536, ("--hbm-scratchpad-page-size=1024",)),
            {"NEURON_RT_EXEC_TIMEOUT": "7", "NEURON_SCRATCHPAD_PAGE_SIZE": "2048"},
            ("7", "2048"),
        ),
    ],
)
def test_variables_of_the_library_follow_from_the_bundle(
    toy_bundle: ToyBundle,
    monkeypatch: pytest.MonkeyPatch,
    *,
    max_length: int,
    flags: tuple[str, ...],
    given: dict[str, str],
    expected: tuple[str, str | None],
) -> None:
    """AWS says that scratchpad pages are of the size that neuronx-cc was told; the operator's values stay."""
    names = ("NEURON_RT_EXEC_TIMEOUT", "NEURON_SCRATCHPAD_PAGE_SIZE")
    for name in names:
        # Set first, so that it is put back whatever it was.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limits = msgspec.structs.replace(toy_bundle.manifest.limits, max_length=max_length)
    executables = tuple(
        msgspec.structs.replace(one, neff=msgspec.structs.replace(one.neff, compiler_flags=flags))  # type: ignore[type-var]
        for one in toy_bundle.manifest.executables
    )
    manifest = msgspec.structs.replace(toy_bundle.manifest, limits=limits, executables=executables)
    load_executor(manifest, 0, toy_bundle.blob_path).close()
    assert tuple(map(os.environ.get, names)) == expected


def test_steps_run_without_the_interpreters_lock(executor: Executor, faults: Faults, tmp_path: Path) -> None:
    """The core waits in its step for a file that another thread of this process makes."""
    go = tmp_path / "go"
    faults.set("nrt_execute", f"wait {go}")
    ended = threading.Event()

    def run() -> None:
        executor.run(CTE, prompt_inputs([5], 0))
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert not ended.is_set()
    go.touch()
    thread.join(HANG_S)
    assert ended.is_set()
