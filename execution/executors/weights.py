"""Maps weights from safetensors files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bundle.errors import FieldViolation
from bundle.host.shortage import find_shortage
from bundle.manifest import MODEL_WEIGHTS, Manifest, WeightShard
from execution.dtypes import dtype_name
from execution.errors import WeightsInvalid, WeightsNotStaged


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


class RankWeights:
    """One rank's weights: those in use and, if a swap is prepared, those staged to replace them.

    Both are by weight set and name; `staged` is None if nothing is staged. Sets that came without a file are missing
    from `active` until a swap.
    """

    def __init__(self, manifest: Manifest, rank: int, blob_path: Callable[[str], Path]) -> None:
        self._shards = {
            weight_set.name: next(shard for shard in weight_set.shards if shard.rank == rank)
            for weight_set in manifest.weight_sets
        }
        self.active = {
            name: map_weights(blob_path(shard.blob), shard)
            for name, shard in self._shards.items()
            if shard.blob is not None
        }
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

    def swap(self) -> None:
        """Puts the staged weights in use."""
        if self.staged is None:
            raise WeightsNotStaged
        self.active, self.staged = self.staged, None

    def discard_staged(self) -> None:
        """Releases staged weights, if any."""
        self.staged = None

    def close(self) -> None:
        """Releases all weights."""
        self.active, self.staged = {}, None
