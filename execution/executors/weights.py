"""Maps weights from safetensors files, and makes those of mutable sets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bundle.errors import FieldViolation
from bundle.host.shortage import find_shortage
from bundle.manifest import MODEL_WEIGHTS, Manifest, WeightSet, WeightShard
from execution.dtypes import dtype_name
from execution.errors import EntryUnknown, WeightSetNotMutable, WeightsInvalid, WeightsNotStaged
from execution.executors.state import ZeroedTensors


def map_weights(path: Path, shard: WeightShard) -> dict[str, Tensor]:
    """Maps a weight file. The tensors are the file's own pages, which all processes that map it share.

    The file must not change while the tensors live. It must hold those of `shard`, and may hold others. Each tensor
    must begin at a multiple of its element size; more alignment does not make products faster.
    """
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            tensors = {spec.name: file.get_tensor(spec.name) for spec in shard.tensors if spec.name in held}
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        detail = f"it cannot be read as safetensors ({type(error).__name__}); the log of its rank says why"
        raise find_shortage(error) or WeightsInvalid(shard.rank, detail) from error
    violations = []
    for spec in shard.tensors:
        accepted = f"{spec.dtype} {list(spec.shape)}"
        tensor = tensors.get(spec.name)
        got = "nothing" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        if got != accepted:
            violations.append(FieldViolation(f"tensors[{spec.name}]", got, accepted))
    if violations:
        detail = f"{len(violations)} of {len(shard.tensors)} tensors differ, the first: {violations[0]}"
        raise WeightsInvalid(shard.rank, detail, violations)
    return tensors


class MappedEntries:
    """Files of entries of a rank's mutable weight sets, checked and mapped.

    As many as the manifest says stay mapped, those used last: writing one of them again only copies it.
    """

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self._shards = {one.name: find_shard(one, rank) for one in manifest.weight_sets if one.is_mutable}
        self._max_files = manifest.serving.max_host_adapters
        # By weight set and what tells the file from others; the one used last is the last.
        self._files: OrderedDict[tuple[object, ...], dict[str, Tensor]] = OrderedDict()

    def map(self, weight_set: str, index: int, path: Path | None) -> dict[str, Tensor] | None:
        """Checks a write of one entry; see `execution.executors.executor.Executor.write`.

        Returns:
            The tensors of the entry, by name, mapped from their file; None if there is no file, as the write zeroes.
        """
        if weight_set not in self._shards:
            raise WeightSetNotMutable(weight_set, sorted(self._shards))
        shard = self._shards[weight_set]
        num_entries = min(spec.shape[0] for spec in shard.tensors)
        if not 0 <= index < num_entries:
            raise EntryUnknown(weight_set, index, num_entries - 1)
        if path is None:
            return None
        file = weight_set, path, _identify(path)
        entry = self._files.pop(file, None)
        if entry is None:
            entry = map_weights(path, shard.entry())
        self._files[file] = entry
        if len(self._files) > self._max_files:
            self._files.popitem(last=False)
        return entry

    def close(self) -> None:
        """Releases all files."""
        self._files.clear()


def _identify(path: Path) -> tuple[int, ...] | None:
    """What changes if another file takes this one's path; None if there is no file, which mapping it reports."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def find_shard(weight_set: WeightSet, rank: int) -> WeightShard:
    """Finds the shard of a rank."""
    return next(shard for shard in weight_set.shards if shard.rank == rank)


class RankWeights:
    """One rank's weights: those in use, and those staged beside them: the next ones, or old ones that a swap kept.

    Both are by weight set and name; `staged` is None if nothing is staged. Sets that came without a file are missing
    from `active` until a swap, but for mutable ones: these begin with zeros, and no swap replaces them.
    """

    def __init__(self, manifest: Manifest, rank: int, blob_path: Callable[[str], Path]) -> None:
        self._entries = MappedEntries(manifest, rank)
        self._shards = {one.name: find_shard(one, rank) for one in manifest.weight_sets}
        self.active: dict[str, dict[str, Tensor]] = {}
        for one in manifest.weight_sets:
            shard = self._shards[one.name]
            if one.is_mutable:
                # Rows of several adapters read all of it in a step: in small pages, at two thirds of the speed.
                self.active[one.name] = ZeroedTensors(shard.tensors, f"weight set {one.name!r}").tensors
            elif shard.blob is not None:
                self.active[one.name] = map_weights(blob_path(shard.blob), shard)
        self.staged: dict[str, dict[str, Tensor]] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every weight set is mapped, so that executables can run."""
        return self.active.keys() == self._shards.keys()

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors in use."""
        return sum(tensor.nbytes for tensors in self.active.values() for tensor in tensors.values())

    def stage(self, path: Path) -> dict[str, dict[str, Tensor]]:
        """Maps other model weights in place of any staged before; returns the tensors that a swap would put in use."""
        self.staged = {**self.active, MODEL_WEIGHTS: map_weights(path, self._shards[MODEL_WEIGHTS])}
        return self.staged

    def check(self, weight_set: str, index: int, path: Path | None) -> None:
        """Checks a write, and keeps its file mapped for it."""
        self._entries.map(weight_set, index, path)

    def write(self, weight_set: str, index: int, path: Path | None) -> None:
        """Writes one entry of a mutable set in place, so that programs need not be bound to it again."""
        entry = self._entries.map(weight_set, index, path)
        for name, tensor in self.active[weight_set].items():
            if entry is None:
                tensor[index].zero_()
            else:
                tensor[index].copy_(entry[name])

    def swap(self) -> None:
        """Exchanges the staged weights and those in use."""
        if self.staged is None:
            raise WeightsNotStaged
        self.active, self.staged = self.staged, self.active

    def discard_staged(self) -> None:
        """Releases staged weights, if any."""
        self.staged = None

    def close(self) -> None:
        """Releases all weights."""
        self._entries.close()
        self.active, self.staged = {}, None
