"""Reads pickled weight files through torch's restricted unpickler, which runs no code of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from compiler_svc.weights.errors import CheckpointInvalid

#: The number with which a file of torch before release 1.6 begins. Such a file is one stream, from which nothing can be
#: mapped: reading it takes memory for all of its tensors.
_OLD_MAGIC: Final = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
_CONVERSION: Final = 'import torch; torch.save(torch.load("{name}", map_location="cpu", weights_only=True), "{name}")'
_ACCEPTED: Final = "a state dict of plain tensors, saved by torch 1.6 or newer"


def load_pickle(file: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Maps the tensors of a file into memory instead of reading them."""
    return check_state(unpickle(file, checkpoint), file, checkpoint)


def unpickle(file: Path, checkpoint: Path) -> dict[Any, Any]:
    """Maps the tensors of a file that holds a mapping, whatever else that has."""
    if _is_of_old_torch(file):
        conversion = _CONVERSION.format(name=file.name)
        accepted = f"{_ACCEPTED}: `python -c '{conversion}'`, in the checkpoint's directory, makes one of it"
        raise CheckpointInvalid(checkpoint, file.name, "a file in the form before torch 1.6", accepted)
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    # On hostile bytes the unpickler can raise any exception.
    except Exception as error:
        detail = str(error).partition("\n")[0]
        raise CheckpointInvalid(checkpoint, file.name, f"a broken file ({detail})", _ACCEPTED) from error
    if not isinstance(state, dict):
        raise CheckpointInvalid(checkpoint, file.name, f"a {type(state).__name__}", _ACCEPTED)
    return state


def check_state(state: dict[Any, Any], file: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Checks that a mapping has plain tensors by their names."""
    for name, tensor in state.items():
        if not isinstance(name, str) or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
            raise CheckpointInvalid(checkpoint, f"{file.name}: {name}", f"a {type(tensor).__name__}", _ACCEPTED)
    return state


def read_pickle_header(file: Path, checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Reads dtype and shape of every tensor in a file, by name."""
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in load_pickle(file, checkpoint).items()
    }


def _is_of_old_torch(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return _OLD_MAGIC in opened.read(16)
    except OSError:  # for torch to name
        return False
