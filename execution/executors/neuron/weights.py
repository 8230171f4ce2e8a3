"""Weights in the memory of the rank's core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from bundle.manifest import MODEL_WEIGHTS, Manifest
from execution.errors import WeightsNotStaged
from execution.executors.neuron.device import DeviceTensor, NeuronDevice
from execution.executors.weights import map_weights

#: By weight set and name.
_Weights = dict[tuple[str, str], DeviceTensor]


class DeviceWeights:
    """One rank's weights on its core: those in use and, if a swap is prepared, those staged to replace them.

    `active` has those in use, by weight set and name; sets that came without a file are missing until a swap.
    """

    def __init__(self, device: NeuronDevice, manifest: Manifest, rank: int, blob_path: Callable[[str], Path]) -> None:
        """Writes every weight set to the core, straight from the pages of its file."""
        self._device = device
        self._shards = {
            weight_set.name: next(shard for shard in weight_set.shards if shard.rank == rank)
            for weight_set in manifest.weight_sets
        }
        self.active: _Weights = {}
        self._staged: _Weights | None = None
        try:
            for name, shard in self._shards.items():
                if shard.blob is not None:
                    self.active |= self._upload(name, map_weights(blob_path(shard.blob), shard))
        except BaseException:
            self.close()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether every weight set is on the core, so that executables can run."""
        return {name for name, _ in self.active} == {name for name, shard in self._shards.items() if shard.tensors}

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors in use."""
        return sum(tensor.size_bytes for tensor in self.active.values())

    def map(self, path: Path) -> Mapping[str, Tensor]:
        """Maps other model weights from their file."""
        return map_weights(path, self._shards[MODEL_WEIGHTS])

    def stage(self, mapped: Mapping[str, Tensor]) -> Mapping[tuple[str, str], DeviceTensor]:
        """Writes what `map` returned to the core; returns the tensors that a swap would put in use."""
        self.discard_staged()
        self._staged = self._upload(MODEL_WEIGHTS, mapped)
        return self.active | self._staged

    def swap(self) -> None:
        """Puts the staged weights in use, and frees those that they replace."""
        if self._staged is None:
            raise WeightsNotStaged
        replaced = [self.active[key] for key in self._staged if key in self.active]
        self.active = self.active | self._staged
        self._staged = None
        for tensor in replaced:
            tensor.free()

    def discard_staged(self) -> None:
        """Frees staged weights, if any."""
        _free(self._staged or {})
        self._staged = None

    def close(self) -> None:
        """Frees all weights."""
        self.discard_staged()
        _free(self.active)
        self.active = {}

    def _upload(self, weight_set: str, tensors: Mapping[str, Tensor]) -> _Weights:
        """Writes tensors to new memory of the core. The file need not stay mapped."""
        needed_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._device.require_memory(f"weights of {weight_set}", needed_bytes)
        uploaded: _Weights = {}
        try:
            for name, tensor in tensors.items():
                on_core = uploaded[weight_set, name] = DeviceTensor(self._device, name, tensor.nbytes)
                on_core.write(tensor.data_ptr())
        except BaseException:
            _free(uploaded)
            raise
        return uploaded


def _free(tensors: _Weights) -> None:
    for tensor in tensors.values():
        tensor.free()
