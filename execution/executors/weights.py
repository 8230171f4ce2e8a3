"""Weights, mapped from safetensors files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bundle.errors import FieldViolation
from bundle.manifest import Manifest, WeightShard
from execution.dtypes import dtype_name
from execution.errors import WeightsInvalid, WeightsNotStaged

#: The weight set of a plain model, which staging replaces.
MODEL_WEIGHTS: Final = "model"


def map_weights(path: Path, shard: WeightShard) -> dict[str, Tensor]:
    """Maps a weight file: the tensors are the file's own pages, shared with every process that maps it.

    The file must stay as it is while the tensors live. Each tensor must begin at a multiple of its element size;
    more alignment makes products no faster.

    Args:
        shard: What the file must hold. It may hold more.

    Raises:
        WeightsInvalid: The file is unreadable, or a tensor is missing or of another dtype or shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            tensors = {spec.name: file.get_tensor(spec.name) for spec in shard.tensors if spec.name in held}
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise WeightsInvalid(str(path), str(error)) from error
    violations = []
    for spec in shard.tensors:
        accepted = f"{spec.dtype} {list(spec.shape)}"
        tensor = tensors.get(spec.name)
        got = "nothing" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        if got != accepted:
            violations.append(FieldViolation(f"tensors[{spec.name}]", got, accepted))
    if violations:
        detail = f"{len(violations)} of {len(shard.tensors)} tensors differ, the first: {violations[0]}"
        raise WeightsInvalid(str(path), detail, violations)
    return tensors


class RankWeights:
    """One rank's weights: those in use, and perhaps others staged to take their place.

    Attributes:
        active: Tensors in use, by weight set and name; sets that came without a file are missing until a swap.
        staged: What would be in use after a swap, None where nothing is staged.
    """

    def __init__(self, manifest: Manifest, rank: int, blob_path: Callable[[str], Path]) -> None:
        """Maps every weight set.

        Raises:
            WeightsInvalid: A file does not fit.
        """
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
        """Whether every weight set is there, so that executables can run."""
        return self.active.keys() == self._shards.keys()

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors in use."""
        return sum(tensor.nbytes for tensors in self.active.values() for tensor in tensors.values())

    def stage(self, path: Path) -> dict[str, dict[str, Tensor]]:
        """Maps other model weights, replacing what was staged, and returns what would be in use.

        Raises:
            WeightsInvalid: The file does not fit; nothing has changed then.
        """
        self.staged = {**self.active, MODEL_WEIGHTS: map_weights(path, self._shards[MODEL_WEIGHTS])}
        return self.staged

    def swap(self) -> None:
        """Puts the staged weights in use.

        Raises:
            WeightsNotStaged: Nothing is staged.
        """
        if self.staged is None:
            raise WeightsNotStaged
        self.active, self.staged = self.staged, None

    def discard_staged(self) -> None:
        """Lets go of staged weights, if there are any."""
        self.staged = None

    def close(self) -> None:
        """Lets go of all weights."""
        self.active, self.staged = {}, None
