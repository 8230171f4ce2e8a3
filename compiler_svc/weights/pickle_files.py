"""Reads pickled weight files through torch's restricted unpickler, which runs no code of the file."""

from __future__ import annotations

from pathlib import Path

import torch

from compiler_svc.weights.errors import CheckpointInvalid


def load_pickle(file: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Maps the tensors of a file into memory instead of reading them."""
    accepted = "a state dict of plain tensors, saved by torch 1.6 or newer"
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    # On hostile bytes the unpickler can raise any exception.
    except Exception as error:
        detail = str(error).partition("\n")[0]
        raise CheckpointInvalid(checkpoint, file.name, f"a broken file ({detail})", accepted) from error
    if not isinstance(state, dict):
        raise CheckpointInvalid(checkpoint, file.name, f"a {type(state).__name__}", accepted)
    for name, tensor in state.items():
        if not isinstance(name, str) or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
            raise CheckpointInvalid(checkpoint, f"{file.name}: {name}", f"a {type(tensor).__name__}", accepted)
    return state


def read_pickle_header(file: Path, checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Reads dtype and shape of every tensor in a file, by name."""
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in load_pickle(file, checkpoint).items()
    }
