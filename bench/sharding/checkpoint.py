"""A Llama of the 8 B model's shape with as many layers as fill a size, in files of 4 GB, quickly made."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

from compiler_svc.models.registry import describe_model

FILE_SIZE_BYTES: Final = 4 * 10**9
#: Bytes of values that repeat: more than any cache holds.
_PATTERN_SIZE_BYTES: Final = 64 << 20

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def write_checkpoint(path: Path, size_bytes: float) -> int:
    """Writes a bfloat16 checkpoint of about a size into an empty directory, durably.

    Returns:
        Size of its tensors in bytes.
    """
    one, two = (_count_bytes(_list_shapes(num_layers)) for num_layers in (1, 2))
    num_layers = max(1, round((size_bytes - one) / (two - one)) + 1)
    (path / "config.json").write_text(json.dumps(_config(num_layers)))
    pattern = _make_pattern()
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in _list_shapes(num_layers).items():
        if files[-1] and _count_bytes(files[-1] | {name: shape}) > FILE_SIZE_BYTES:
            files.append({})
        files[-1][name] = shape
    weight_map = {}
    for number, shapes in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write_file(path / file, shapes, pattern)
        weight_map |= dict.fromkeys(shapes, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return _count_bytes(_list_shapes(num_layers))


def _config(num_layers: int) -> dict[str, Any]:
    return _CONFIG | {"num_hidden_layers": num_layers}


def _list_shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    return dict(describe_model(_config(num_layers)).checkpoint_tensors())


def _count_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    return 2 * sum(map(math.prod, shapes.values()))


def _make_pattern() -> memoryview:
    """Random bfloat16 numbers between 2**-7 and 2 in magnitude, whose bytes no file system can compress much."""
    words = np.random.default_rng(0).integers(0, 1 << 16, _PATTERN_SIZE_BYTES // 2, dtype=np.uint16)
    return memoryview(((words & 0x83FF) | 0x3C00).astype(np.uint16)).cast("B")


def _write_file(path: Path, shapes: dict[str, tuple[int, ...]], pattern: memoryview) -> None:
    offset, entries = 0, {}
    for name, shape in shapes.items():
        size_bytes = _count_bytes({name: shape})
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, offset + size_bytes)}
        offset += size_bytes
    header = json.dumps(entries).encode()
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        while offset:
            offset -= file.write(pattern[:offset])
