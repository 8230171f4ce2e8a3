"""Adapters of small random models, written by PEFT, which is the oracle of what they change."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import peft
import torch
from safetensors.torch import load, load_file, save_file

from compiler_svc.adapters.files import open_adapter
from compiler_svc.adapters.fitting import FittedAdapter, fit_adapter
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.specs import AdapterSlots, LinearSpec
from compiler_svc.models.transforms import Adapters, ModelChanges
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.specs import make_plan
from tests.checkpoints.tiny_models import TinyModel
from tests.ranks.stepping import load_shard

#: Of the largest weight: how far float32 sums in another order may be apart.
TOLERANCE: Final = 1e-5

#: Tensors of a file, by name.
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WrittenAdapter:
    """An adapter as PEFT has written it, which tests copy and change."""

    path: Path

    @property
    def weights(self) -> Path:
        return self.path / "adapter_model.safetensors"

    def copy(self, path: Path, edit: Callable[[State], Any] = lambda _: None) -> Path:
        """Copies it to a path that does not exist, with its tensors edited."""
        shutil.copytree(self.path, path)
        state = load_file(path / "adapter_model.safetensors")
        edit(state)
        save_file(state, path / "adapter_model.safetensors")
        return path


def make_adapter(
    tiny: TinyModel, path: Path, *, seed: int = 0, is_pickled: bool = False, **options: Any
) -> peft.PeftModel:
    """Writes an adapter with random matrices, and returns the model with it.

    Args:
        options: Of PEFT's LoraConfig; by default it changes every linear layer but the head.
    """
    config = peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, "lora_alpha": 6} | options)
    model = peft.get_peft_model(copy.deepcopy(tiny.model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
    model.save_pretrained(path, safe_serialization=not is_pickled, save_embedding_layers=False)
    return model


def merge(model: peft.PeftModel, path: Path) -> Checkpoint:
    """Writes the checkpoint of a model that the adapter is merged into."""
    model.merge_and_unload().save_pretrained(path)
    return Checkpoint.open(path)


def with_room(
    description: ModelDescription, *, rank: int = 8, targets: tuple[str, ...] = (), fuses_qkv: bool = False
) -> ModelDescription:
    """The model with room for two adapters."""
    adapters = Adapters(slots=AdapterSlots(slots=2, rank=rank), targets=targets)
    return ModelChanges(fuses_qkv=fuses_qkv, adapters=adapters).apply(description)


def fit(path: Path, description: ModelDescription, *, dtype: Any = "float32", tp_degree: int = 1) -> FittedAdapter:
    return fit_adapter(open_adapter(path), description, dtype=dtype, tp_degree=tp_degree)


def load_ranks(fitted: FittedAdapter) -> list[dict[str, torch.Tensor]]:
    """The tensors of each rank's file."""
    sinks = {rank: io.BytesIO() for rank in range(fitted.plan.tp_degree)}
    size_bytes = fitted.write(sinks)
    assert {len(sink.getvalue()) for sink in sinks.values()} == {size_bytes}
    return [load(sink.getvalue()) for sink in sinks.values()]


def check_merged(tiny: TinyModel, merged: Checkpoint, fitted: FittedAdapter, description: ModelDescription) -> None:
    """Checks that base and adapter of each rank give the matrices that the rank has of the merged model."""
    plan = make_plan(tiny.checkpoint, tp_degree=fitted.plan.tp_degree, description=description)
    for rank, matrices in enumerate(load_ranks(fitted)):
        base, wanted = (load_shard(plan, checkpoint, rank) for checkpoint in (tiny.checkpoint, merged))
        changed = {f"{linear.name}.weight": linear for linear in description.linears() if list_adapted(linear)}
        for name, linear in changed.items():
            added = torch.cat([matrices[f"{one}.lora_B"] @ matrices[f"{one}.lora_A"] for one in list_adapted(linear)])
            difference = (base[name] + added - wanted[name]).abs().max()
            assert difference <= TOLERANCE * wanted[name].abs().max(), f"{name} of rank {rank}"
        for name in base.keys() - changed.keys():
            assert torch.equal(base[name], wanted[name]), name


def list_adapted(linear: LinearSpec) -> list[str]:
    """Names of the parts of a layer, or of itself, that have room for adapters: all of them or none."""
    parts = linear.parts or (linear,)
    adapted = [part.name for part in parts if part.adapters is not None]
    assert len(adapted) in (0, len(parts))
    return adapted
