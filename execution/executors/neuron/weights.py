"""Weights in the memory of the rank's core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from bundle.manifest import MODEL_WEIGHTS, Manifest, WeightShard
from execution.errors import WeightsNotStaged
from execution.executors.neuron.device import DeviceTensor, NeuronDevice
from execution.executors.neuron.program import count_bytes
from execution.executors.weights import MappedEntries, find_shard, map_weights

#: By weight set and name.
_Weights = dict[tuple[str, str], DeviceTensor]


class DeviceWeights:
    """One rank's weights on its core: those in use, and those staged beside them: the next ones, or old ones.

    `active` has those in use, by weight set and name; sets that came without a file are missing until a swap, but for
    mutable ones: these begin with zeros, and no swap replaces them.
    """

    def __init__(self, device: NeuronDevice, manifest: Manifest, rank: int, blob_path: Callable[[str], Path]) -> None:
        """Writes weights to the core, straight from the pages of their files."""
        self._device = device
        self._entries = MappedEntries(manifest, rank)
        self._shards = {one.name: find_shard(one, rank) for one in manifest.weight_sets}
        self.active: _Weights = {}
        self._staged: _Weights | None = None
        try:
            for one in manifest.weight_sets:
                shard = self._shards[one.name]
                if one.is_mutable:
                    self.active |= self._make_zeros(one.name, shard)
                elif shard.blob is not None:
                    self.active |= self._upload(one.name, map_weights(blob_path(shard.blob), shard))
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

    def check(self, weight_set: str, index: int, path: Path | None) -> None:
        """Checks a write, and keeps its file mapped for it."""
        self._entries.map(weight_set, index, path)

    def write(self, weight_set: str, index: int, path: Path | None) -> None:
        """Writes one entry of a mutable set in place, so that programs need not be bound to it again."""
        entry = self._entries.map(weight_set, index, path)
        for spec in self._shards[weight_set].tensors:
            tensor, entry_bytes = self.active[weight_set, spec.name], count_bytes(spec.dtype, spec.shape[1:])
            if entry is None:
                tensor.zero(index * entry_bytes, entry_bytes)
            else:
                tensor.write(entry[spec.name].data_ptr(), index * entry_bytes, entry_bytes)

    def swap(self) -> None:
        """Puts the staged weights in use; those that they replace are staged then."""
        if self._staged is None:
            raise WeightsNotStaged
        replaced = {key: self.active[key] for key in self._staged if key in self.active}
        self.active = self.active | self._staged
        self._staged = replaced

    def discard_staged(self) -> None:
        """Frees staged weights, if any."""
        _free(self._staged or {})
        self._staged = None

    def close(self) -> None:
        """Frees all weights."""
        self._entries.close()
        self.discard_staged()
        _free(self.active)
        self.active = {}

    def _upload(self, weight_set: str, tensors: Mapping[str, Tensor]) -> _Weights:
        """Writes tensors to new memory of the core. The file need not stay mapped."""
        sizes_bytes = {name: tensor.nbytes for name, tensor in tensors.items()}
        return self._allocate(weight_set, sizes_bytes, lambda name, made: made.write(tensors[name].data_ptr()))

    def _make_zeros(self, weight_set: str, shard: WeightShard) -> _Weights:
        """Makes the tensors of a mutable set."""
        sizes_bytes = {spec.name: count_bytes(spec.dtype, spec.shape) for spec in shard.tensors}
        return self._allocate(weight_set, sizes_bytes, lambda _, made: made.zero(0, made.size_bytes))

    def _allocate(
        self, weight_set: str, sizes_bytes: Mapping[str, int], fill: Callable[[str, DeviceTensor], None]
    ) -> _Weights:
        """Makes tensors of all the sizes, each filled by its name, or none if that fails."""
        self._device.require_memory(f"weights of {weight_set}", sum(sizes_bytes.values()))
        made: _Weights = {}
        try:
            for name, size_bytes in sizes_bytes.items():
                made[weight_set, name] = DeviceTensor(self._device, name, size_bytes)
                fill(name, made[weight_set, name])
        except BaseException:
            _free(made)
            raise
        return made


def _free(tensors: _Weights) -> None:
    for tensor in tensors.values():
        tensor.free()
