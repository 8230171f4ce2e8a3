"""Scales of KV caches in checkpoints, in the shapes of NxD Inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiler_svc.models.state import KeptAs, ScaleKind
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import TinyModel

#: About what small random models' keys and values are divided by.
SPREADS: Final = {"int8": 0.03, "float8_e4m3fn": 0.5}


def add_cache_scales(tiny: TinyModel, path: Path, kept: KeptAs) -> tuple[TinyModel, list[tuple[Tensor, Tensor]]]:
    """Writes random scales into a Llama checkpoint if `kept` has any; returns those of each layer, or ones."""
    config, generator = tiny.model.config, torch.Generator().manual_seed(5)
    kinds, spread = (kept.key_scales, kept.value_scales), SPREADS[kept.dtype]
    scales = []
    for _ in range(config.num_hidden_layers):
        keys, values = (_draw(kind, config, spread, generator) for kind in kinds)
        scales.append((keys, values))
    if kept.key_scales is None:
        return tiny, scales
    tensors = load_file(path / "model.safetensors")
    for number, pair in enumerate(scales):
        for name, scale in zip(("k_scale", "v_scale"), pair, strict=True):
            tensors[f"model.layers.{number}.self_attn.{name}"] = scale
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(tiny.model, Checkpoint.open(path)), scales


def _draw(kind: ScaleKind | None, config: Any, spread: float, generator: torch.Generator) -> Tensor:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = {None: (1,), "tensor": (1,), "head": (config.num_key_value_heads, 1, 1), "channel": (1, 1, head_dim)}
    return (torch.rand(shapes[kind], generator=generator) + 0.5) * spread if kind else torch.ones(1)
