"""The measured model: a random Llama whose weights are too large for the caches."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.peers import ADAPTER_RANK, ADAPTERS
from bench.plan import Workload

#: What keys and values of random weights are divided by, so that the largest become some 100.
_CACHE_SCALE: Final = 0.03
_ADAPTER_DEVIATION: Final = 0.01
#: What the name of a checkpoint ends with that has scales of keys and values.
SCALED: Final = "-scaled"
TOKENIZER = Path(__file__).parents[1] / "examples/models/kiln-tiny"


def write_checkpoint(path: Path, workload: Workload) -> None:
    """Writes random parameters of the workload's dtype, and a tokenizer with a token for every id."""
    torch.manual_seed(0)
    config = LlamaConfig(**workload.model, max_position_embeddings=4096, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(getattr(torch, workload.dtype)).save_pretrained(path, max_shard_size="100GB")
    for source in TOKENIZER.glob("*token*.json"):
        (path / source.name).write_text(source.read_text())
    # Tokens that no text gives fill the vocabulary: decoding them costs as much as decoding others.
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for number in range(max(vocabulary.values()) + 1, workload.model["vocab_size"]):
        vocabulary[f"token{number}"] = number
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if any(one.scales_cache for one in workload.bare_engines.values()):
        # Beside it, because a compile that keeps keys and values as they are refuses scales.
        scaled = path.with_name(f"{path.name}{SCALED}")
        shutil.copytree(path, scaled)
        _add_cache_scales(scaled / "model.safetensors", workload.model["num_hidden_layers"])
    num_adapters = max(one.num_adapters for one in workload.bare_engines.values())
    for number in range(num_adapters or min(1, workload.registered)):
        _write_adapter(path, path.with_name(f"{path.name}{ADAPTERS}") / str(number))


def _write_adapter(model: Path, path: Path) -> None:
    """Writes an adapter of every linear layer but the head, in PEFT's format."""
    matrices = {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.endswith("_proj.weight"):
                outputs, inputs = file.get_slice(name).get_shape()
                module = f"base_model.model.{name.removesuffix('.weight')}"
                matrices[f"{module}.lora_A.weight"] = torch.randn(ADAPTER_RANK, inputs) * _ADAPTER_DEVIATION
                matrices[f"{module}.lora_B.weight"] = torch.randn(outputs, ADAPTER_RANK) * _ADAPTER_DEVIATION
    targets = sorted({name.split(".")[-3] for name in matrices})
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": targets}
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(matrices, path / "adapter_model.safetensors", metadata={"format": "pt"})


def _add_cache_scales(path: Path, num_layers: int) -> None:
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(num_layers) for kind in "kv"]
    scales = {name: torch.tensor([_CACHE_SCALE]) for name in names}
    # Not in its place, because what is loaded is the file's own memory.
    scaled = path.with_suffix(".scaled")
    save_file(load_file(path) | scales, scaled, metadata={"format": "pt"})
    scaled.rename(path)


def count_parameters(path: Path) -> tuple[int, int]:
    """Number of parameters of a checkpoint, and of those that a decode step reads: all but other tokens' embeddings."""
    with safe_open(path / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return sum(sizes.values()), sum(size for name, size in sizes.items() if "embed_tokens" not in name)
