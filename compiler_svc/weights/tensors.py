"""Reading a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.pickle_files import load_pickle


class TensorReader:
    """Reads tensors of one checkpoint; a context manager that closes its files.

    Tensors are views of the mapped files: they cost memory when they are touched, and the system may take it back.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, in the checkpoint's dtype and on the CPU.

        Raises:
            CheckpointInvalid: The file changed since the checkpoint was opened.
            KeyError: The checkpoint has no tensor of that name.
        """
        file = self._checkpoint.tensors[name].file
        try:
            source = self._open(file)
            tensor: torch.Tensor = source[name] if isinstance(source, Mapping) else source.get_tensor(name)
        except (SafetensorError, OSError, KeyError) as error:
            detail = f"changed since it was opened ({error})"
            raise CheckpointInvalid(self._checkpoint.path, file.name, detail, "files that stay as they are") from error
        return tensor

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
        self._opened.clear()
        self._stack.close()
