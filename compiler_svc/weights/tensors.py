"""Reads a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from mmap import PAGESIZE
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import torch
from safetensors import SafetensorError, safe_open

from bundle.errors import FieldViolation
from bundle.host.shortage import find_shortage
from compiler_svc.models.surplus import BIAS
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.gguf.model import GgufTensor
from compiler_svc.weights.gguf.values import OpenedBlocks, map_file, read_floats
from compiler_svc.weights.headers import TensorHeader
from compiler_svc.weights.pickle_files import load_pickle
from compiler_svc.weights.unpacking import OpenedMatrix, UnpackedMatrix

#: Items that are looked at together.
_CHUNK_ITEMS: Final = 1 << 24
#: What a reader keeps mapped in memory before `trim` unmaps its files.
MAX_MAPPED_BYTES: Final = 64 << 20


class TensorReader:
    """Reads tensors of one checkpoint. It is a context manager that closes the files.

    Tensors are views of the mapped files: they take memory only once they are touched, and the system may reclaim it.
    It counts as memory of this process until then, so who reads much calls `trim` now and then.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._mapped_before_bytes = _count_mapped_bytes()
        #: The matrix of a name if it is quantized. Blocks of the same one are read in turns.
        self.unpack = lru_cache(maxsize=4)(self._unpack)

    def read(self, name: str) -> torch.Tensor:
        """Reads one whole tensor on the CPU, in the checkpoint's dtype; of a quantized one its values, float32."""
        matrix = self.unpack(name)
        if matrix is not None:
            return matrix.read_rows(0, matrix.matrix.shape[0])
        return self._read(self._checkpoint.tensors[name])

    def _unpack(self, name: str) -> OpenedMatrix | None:
        packed = self._checkpoint.packed.get(name)
        if packed is None:
            return None
        if isinstance(packed, GgufTensor):
            return OpenedBlocks(packed, self._open_gguf(packed))
        matrix = UnpackedMatrix.open(packed, self._read)
        if mistakes := list(matrix.list_mistakes()):
            raise CheckpointInvalid.listing(self._checkpoint.path, mistakes)
        return matrix

    def _read(self, header: TensorHeader) -> torch.Tensor:
        name = header.name
        if (stored := self._checkpoint.gguf.get(name)) is not None:
            return read_floats(stored, self._open_gguf(stored))
        try:
            source = self._open(header.file)
            tensor: torch.Tensor = source[name] if isinstance(source, Mapping) else source.get_tensor(name)
        except (SafetensorError, OSError, KeyError) as error:
            raise find_shortage(error) or self._changed(header, str(error)) from error
        if tuple(tensor.shape) != header.shape:
            raise self._changed(header, f"{name} has shape {list(tensor.shape)}")
        return tensor

    def _open_gguf(self, tensor: GgufTensor) -> torch.Tensor:
        """The mapped file, which has all that its header says."""
        try:
            if tensor.file not in self._opened:
                self._opened[tensor.file] = map_file(tensor.file)
        except (OSError, RuntimeError) as error:
            raise find_shortage(error) or self._changed(self._checkpoint.tensors[tensor.name], str(error)) from error
        data: torch.Tensor = self._opened[tensor.file]
        if len(data) < tensor.stored.start_byte + tensor.stored.size_bytes:
            raise self._changed(self._checkpoint.tensors[tensor.name], f"it has {len(data)} bytes")
        return data

    def trim(self) -> None:
        """Unmaps the files if more than `MAX_MAPPED_BYTES` of them have been touched; `read` maps them again.

        What a caller still holds of a file keeps it mapped.
        """
        if _count_mapped_bytes() - self._mapped_before_bytes > MAX_MAPPED_BYTES:
            self._close()

    def check_finite(self, names: Iterable[str]) -> None:
        """Looks for NaN and values that are infinite as float32, which takes as long as reading the tensors."""
        for name in names:
            tensor = self.read(name)
            items = tensor.reshape(-1)
            for start in range(0, len(items) if tensor.is_floating_point() else 0, _CHUNK_ITEMS):
                chunk = items[start : start + _CHUNK_ITEMS].to(torch.float32)
                invalid = chunk.isfinite().logical_not().nonzero()
                if len(invalid):
                    index = start + int(invalid[0])
                    place = [int(number) for number in torch.unravel_index(torch.tensor(index), tensor.shape)]
                    value = f"{float(items[index])} at {place}"
                    self.refuse(name, value, "finite numbers")

    def refuse(self, name: str, value: str, accepted: str) -> NoReturn:
        """Raises `CheckpointInvalid` for a tensor that has a value which is not accepted."""
        raise CheckpointInvalid(self._checkpoint.path, name, value, accepted)

    def _changed(self, header: TensorHeader, detail: str) -> CheckpointInvalid:
        value = f"changed since it was opened ({detail})"
        return CheckpointInvalid(self._checkpoint.path, header.file.name, value, "files that stay as they are")

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            if file.suffix == ".safetensors":
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            else:
                self._opened[file] = load_pickle(file, self._checkpoint.path)
        return self._opened[file]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self.unpack.cache_clear()
        self._opened.clear()
        self._stack.close()


def _count_mapped_bytes() -> int:
    """Memory that mapped files take of this process, its libraries included."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[2])
    return resident_pages * PAGESIZE


def check_finite(checkpoint: Checkpoint) -> None:
    """Looks for NaN and infinite values in every tensor, which takes as long as reading all of them."""
    with TensorReader(checkpoint) as reader:
        reader.check_finite(sorted(checkpoint.tensors))


def check_zeros(checkpoint: Checkpoint) -> None:
    """Checks that biases which were set aside are zeros, so that the model is the same without them."""
    biases = {one.header.name: one.header for one in checkpoint.surplus if one.is_bias}
    with TensorReader(replace(checkpoint, tensors=biases)) as reader:
        mistakes = [
            FieldViolation(name, f"unexpected: it belongs to {BIAS.belongs_to}", BIAS.accepted)
            for name in biases
            if reader.read(name).to(torch.float32).any()
        ]
    if mistakes:
        raise CheckpointInvalid.listing(checkpoint.path, mistakes)


def check_tied_head(checkpoint: Checkpoint, head: str, table: str) -> None:
    """Checks that a stored matrix of a head that is tied is the embedding's table, which is what the shards hold.

    transformers keeps a pair that differs apart, whatever `tie_word_embeddings` says.
    """
    if not {head, table} <= checkpoint.tensors.keys():
        return
    with TensorReader(checkpoint) as reader:
        stored, shared = reader.read(head), reader.read(table)
        rows = max(1, _CHUNK_ITEMS // max(1, shared[:1].numel()))
        starts = range(0, len(shared), rows) if stored.shape == shared.shape else ()
        equal = (torch.equal(stored[start : start + rows], shared[start : start + rows]) for start in starts)
        if stored.shape != shared.shape or not all(equal):
            accepted = f"the same as {table}, or `tie_word_embeddings` false"
            raise CheckpointInvalid(checkpoint.path, head, "another matrix, though the head is tied", accepted)
