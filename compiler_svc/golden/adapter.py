"""A random adapter, by which the golden check tries the room that a bundle has for adapters.

It has the full rank of the slots, and changes every module that has room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from bundle.abi.tensor import DType
from compiler_svc.adapters.config import AdapterConfig
from compiler_svc.adapters.files import KINDS, Adapter, Kind, LowRank
from compiler_svc.adapters.fitting import Module, fit_adapter, list_modules
from compiler_svc.models.description import ModelDescription
from execution.dtypes import TORCH_DTYPES

#: Writes an adapter's files, by rank, into a slot.
PutAdapter = Callable[[int, Mapping[int, Path]], None]

#: Of what an adapter adds, as a share of the magnitude of its input. Matrices of models multiply it by about 1.
_SHARE: Final = 0.3


def draw_adapter(description: ModelDescription, dtype: DType) -> Adapter | None:
    """Draws an adapter of all modules that have room, of the rank of the slots, in values of `dtype`; None if none has
    room.
    """
    modules = [module for module in list_modules(description).values() if module.has_room]
    if not modules:
        return None
    generator = torch.Generator().manual_seed(0)
    changes = tuple(_draw(module, generator, TORCH_DTYPES[dtype]) for module in modules)
    rank = modules[0].slot_rank
    # Its scale is 1.
    return Adapter(Path("golden"), AdapterConfig(rank=rank, alpha=rank, has_root_scale=False), changes)


def _draw(module: Module, generator: torch.Generator, dtype: torch.dtype) -> LowRank:
    rank = module.slot_rank
    tensors: dict[Kind, torch.Tensor] = {}
    for kind in KINDS:
        values = torch.randn(module.shape(kind, rank), generator=generator) / module.shape(kind, rank)[1] ** 0.5
        tensors[kind] = (values if kind == "lora_A" else values * _SHARE).to(dtype)
    return LowRank(module.name, {kind: f"{module.name}.{kind}.weight" for kind in KINDS}, tensors)


def put_adapter(
    adapter: Adapter, description: ModelDescription, slot: int, put: PutAdapter, *, dtype: DType, tp_degree: int
) -> None:
    """Puts the adapter into a slot of every rank."""
    fitted = fit_adapter(adapter, description, dtype=dtype, tp_degree=tp_degree)
    with TemporaryDirectory(prefix="kiln-golden-") as directory:
        paths = {rank: Path(directory) / f"rank{rank}.safetensors" for rank in range(tp_degree)}
        with ExitStack() as files:
            fitted.write({rank: files.enter_context(path.open("wb")) for rank, path in paths.items()})
        put(slot, paths)
