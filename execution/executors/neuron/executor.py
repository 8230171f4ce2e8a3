"""The executor of NEFFs: weights and state lie in the memory of the rank's core, shared by all executables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from bundle.abi.state import StateTensor
from bundle.manifest import Executable, Manifest
from execution.dtypes import TORCH_DTYPES
from execution.errors import ExecutableInvalid, SlotUnknown, WeightsAwaited, WeightsNotStaged
from execution.executors.arguments import StepArguments
from execution.executors.executor import Executor
from execution.executors.neuron.device import EXEC_TIMEOUT, DeviceTensor, NeuronDevice, TensorSet, open_device
from execution.executors.neuron.program import NeffOnCore, count_bytes
from execution.executors.neuron.weights import DeviceWeights
from targets.neuron import NEFF

#: The sets of a program's inputs and outputs, by the digest of its blob.
_Sets = dict[str, tuple[TensorSet, TensorSet]]


_PAGE_SIZE_FLAG: Final = "--hbm-scratchpad-page-size="


def _find_timeout(manifest: Manifest) -> str:
    return f"{NEFF.find_step_timeout_s(manifest.limits.max_length):.0f}"


def _find_page_size(manifest: Manifest) -> str | None:
    """What neuronx-cc was told, in MiB, which it was for long contexts: libnrt has to be told the same, as AWS says."""
    programs = [one.neff for one in manifest.executables if one.neff is not None]
    flags = [flag for program in programs for flag in program.compiler_flags if flag.startswith(_PAGE_SIZE_FLAG)]
    sizes = [flag.removeprefix(_PAGE_SIZE_FLAG) for flag in flags]
    return max((size for size in sizes if size.isdecimal()), key=int, default=None)


#: Variables of libnrt that follow from a bundle, unless the operator has set them; None leaves one alone.
VARIABLES: Final[Mapping[str, Callable[[Manifest], str | None]]] = MappingProxyType(
    {EXEC_TIMEOUT: _find_timeout, "NEURON_SCRATCHPAD_PAGE_SIZE": _find_page_size}
)


def load_neuron_executor(
    manifest: Manifest, rank: int, blob_path: Callable[[str], Path], on_loaded: Callable[[str], None]
) -> Executor:
    """Loads a rank; see `execution.executors.executor.load_executor`."""
    # libnrt reads them when it is initialized or loads a NEFF.
    for name, find in VARIABLES.items():
        value = find(manifest)
        if value is not None:
            os.environ.setdefault(name, value)
    return NeuronExecutor(open_device(manifest.target), manifest, rank, blob_path, on_loaded)


class NeuronExecutor:
    """See `execution.executors.executor.Executor`."""

    def __init__(
        self,
        device: NeuronDevice,
        manifest: Manifest,
        rank: int,
        blob_path: Callable[[str], Path],
        on_loaded: Callable[[str], None],
    ) -> None:
        """Loads a rank onto the device. If that fails, the device holds nothing of it."""
        self._device = device
        self._arguments = StepArguments(manifest)
        _require_bindings(manifest)
        self._sets: _Sets = {}
        self._staged_sets: _Sets | None = None
        with ExitStack() as stack:
            self._weights = DeviceWeights(device, manifest, rank, blob_path)
            stack.callback(self._weights.close)
            self._state = DeviceState(device, manifest)
            stack.callback(self._state.close)
            on_loaded("weights")
            self._programs = self._load_programs(manifest, rank, blob_path, on_loaded, stack)
            if self._weights.is_complete:
                self._sets = self._bind(self._weights.active)
            stack.callback(self._free_sets)
            self._resources = stack.pop_all()

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in use."""
        return self._weights.size_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._state.size_bytes

    def run(self, tag: str, inputs: Mapping[str, Tensor], *, with_old: bool = False) -> dict[str, Tensor]:
        """Runs one executable once."""
        executable = self._arguments.executable(tag)
        arguments = self._arguments.order(executable, inputs)
        if not self._weights.is_complete:
            raise WeightsAwaited
        sets = self._staged_sets if with_old else self._sets
        if sets is None:
            raise WeightsNotStaged
        return self._programs[executable.blob].run(arguments, sets[executable.blob])

    def stage_weights(self, path: Path) -> None:
        """Writes other weights beside those in use."""
        mapped = self._weights.map(path)
        # First, so that the core never holds three.
        self.discard_staged()
        try:
            self._staged_sets = self._bind(self._weights.stage(mapped))
        except BaseException:
            self.discard_staged()
            raise

    def swap_weights(self, *, keeps_old: bool = False) -> None:
        """Puts the staged weights in use: the next step's sets have their tensors under the same names."""
        if self._staged_sets is None:
            raise WeightsNotStaged
        self._sets, self._staged_sets = self._staged_sets, self._sets
        self._weights.swap()
        if not keeps_old:
            self.discard_staged()

    def discard_staged(self) -> None:
        """Releases the weights that are not in use."""
        self._free_staged_sets()
        self._weights.discard_staged()

    def check(self, weight_set: str, index: int, path: Path | None) -> None:
        """Checks a write without writing."""
        self._weights.check(weight_set, index, path)

    def write(self, weight_set: str, index: int, path: Path | None) -> None:
        """Writes one entry of a mutable weight set, or zeroes it."""
        self._weights.write(weight_set, index, path)

    def zero_state(self, slots: Sequence[int] | None) -> int:
        """Zeroes slots, or all for None; returns the bytes written."""
        return self._state.zero(slots)

    def commit_state(self) -> None:
        """Has no effect: the device commits memory when it is allocated."""

    def read_state(self, name: str) -> Tensor:
        """A copy of one state tensor."""
        return self._state.read(name)

    def close(self) -> None:
        """Releases weights, state and executables; the core stays this process's."""
        self._resources.close()

    def _load_programs(
        self,
        manifest: Manifest,
        rank: int,
        blob_path: Callable[[str], Path],
        on_loaded: Callable[[str], None],
        stack: ExitStack,
    ) -> dict[str, NeffOnCore]:
        # By blob: executables of several buckets may be one program.
        programs: dict[str, NeffOnCore] = {}
        bound: dict[str, Executable] = {}
        for executable in manifest.executables:
            first = bound.setdefault(executable.blob, executable)
            if first is executable:
                path = blob_path(executable.blob)
                program = NeffOnCore(self._device, executable, path, manifest, rank)
                stack.callback(program.close)
                programs[executable.blob] = program
            elif (first.neff, first.constants) != (executable.neff, executable.constants):
                detail = f"it is the program of {first.tag}, but takes or returns others"
                raise ExecutableInvalid(executable.tag, detail)
            on_loaded(executable.tag)
        return programs

    def _bind(self, weights: Mapping[tuple[str, str], DeviceTensor]) -> _Sets:
        sets: _Sets = {}
        try:
            for blob, program in self._programs.items():
                sets[blob] = program.bind(weights, self._state.tensors)
        except BaseException:
            _free(sets)
            raise
        return sets

    def _free_sets(self) -> None:
        self._free_staged_sets()
        _free(self._sets)
        self._sets = {}

    def _free_staged_sets(self) -> None:
        _free(self._staged_sets or {})
        self._staged_sets = None


class DeviceState:
    """See `execution.executors.state.RankState`. All programs have its tensors as inputs and as outputs."""

    def __init__(self, device: NeuronDevice, manifest: Manifest) -> None:
        self._specs: dict[str, StateTensor] = {spec.name: spec for spec in manifest.state.tensors}
        self._num_entries = manifest.state.num_entries
        self.tensors: dict[str, DeviceTensor] = {}
        device.require_memory("the KV cache", sum(map(_count_state, self._specs.values())))
        try:
            for name, spec in self._specs.items():
                self.tensors[name] = DeviceTensor(device, name, _count_state(spec))
            self.zero(None)
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def zero(self, slots: Sequence[int] | None) -> int:
        """Zeroes the given slots or blocks, or all for None; returns the bytes written."""
        if slots is None:
            for tensor in self.tensors.values():
                tensor.zero(0, tensor.size_bytes)
            return self.size_bytes
        for slot in slots:
            if not 0 <= slot < self._num_entries:
                raise SlotUnknown(slot, self._num_entries - 1)
        written = 0
        for name, tensor in self.tensors.items():
            row_bytes = tensor.size_bytes // self._specs[name].shape[0]
            # The slot is the first axis, so neighbours are zeroed by one call.
            for first, count in _list_runs(slots):
                tensor.zero(first * row_bytes, count * row_bytes)
                written += count * row_bytes
        return written

    def read(self, name: str) -> Tensor:
        """Copies one tensor to the host."""
        spec = self._specs[name]
        result = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        self.tensors[name].read(result.data_ptr())
        return result

    def close(self) -> None:
        """Gives the memory back."""
        for tensor in self.tensors.values():
            tensor.free()
        self.tensors = {}


def _list_runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Joins slots that follow each other: first slot and number of each run."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(set(slots)):
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs


def _count_state(spec: StateTensor) -> int:
    return count_bytes(spec.dtype, spec.shape)


def _free(sets: _Sets) -> None:
    for pair in sets.values():
        for one in pair:
            one.free()


def _require_bindings(manifest: Manifest) -> None:
    held = {
        (weight_set.name, tensor.name)
        for weight_set in manifest.weight_sets
        for shard in weight_set.shards
        for tensor in shard.tensors
    }
    for executable in manifest.executables:
        for one in executable.constants:
            if (one.weight_set, one.tensor) not in held:
                detail = f"constant {one.name} is bound to {one.weight_set}/{one.tensor}, which is no weight"
                raise ExecutableInvalid(executable.tag, detail)
