"""A Llama of one layer with drawn weights, and the logits that transformers computes for it."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

_HIDDEN, _INTERMEDIATE, _VOCABULARY = 32, 64, 16
_SEED: Final = 15
_MAX_WEIGHT: Final = 0.5

#: The checkpoint's `config.json`.
MODEL_CONFIG: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": _VOCABULARY,
    }
)

#: The configuration of the compile: one executable for prompts, one for tokens.
INFERENCE_CONFIG: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "neuron_config": {
            "seq_len": 32,
            "batch_size": 1,
            "torch_dtype": "float32",
            "enable_bucketing": True,
            "context_encoding_buckets": [8],
            "token_generation_buckets": [32],
            "output_logits": True,
        }
    }
)

#: Token ids.
PROMPT: Final[Sequence[int]] = (3, 14, 1, 5, 9)

#: float32 [tokens, vocabulary]: logits of the tokens that follow the prompt greedily. The first row comes from the
#: executable for prompts, the second from the one for tokens.
# fmt: off
GOLDEN: Final[Sequence[Sequence[float]]] = (
    (
        -0.0577021, 0.9191145, 0.2296873, 0.4472513, -0.9466898, -0.4855372, -0.5224056, 0.0364848,
        -0.3571430, 0.1350963, -0.2943500, -0.7873839, 0.0691678, 0.4118077, -0.4532513, -0.6034664,
    ),
    (
        -0.1524179, 0.5517700, -0.1150052, 0.1154948, -0.5757719, -0.3478050, -0.4466994, 0.6957871,
        0.3122630, -0.7519575, 0.3985169, -0.3134016, 0.1118901, 0.5343496, -0.1274580, -0.5479329,
    ),
)
# fmt: on

#: Shapes of the weights by name.
_SHAPES: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "model.layers.0.input_layernorm.weight": (_HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (_HIDDEN, _HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (_HIDDEN, _HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (_HIDDEN, _HIDDEN),
        "model.layers.0.post_attention_layernorm.weight": (_HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
    }
)


def write_checkpoint(directory: Path) -> None:
    """Writes `config.json` and `model.safetensors`. The weights are the same on every host."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(MODEL_CONFIG)))
    generator = random.Random(_SEED)
    header: dict[str, Any] = {}
    data = bytearray()
    for name, shape in _SHAPES.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = (generator.uniform(-_MAX_WEIGHT, _MAX_WEIGHT) for _ in range(count))
        begin = len(data)
        data += struct.pack(f"<{count}f", *values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(data)]}
    described = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(described)) + described + data)


def find_deviation(logits: Sequence[Sequence[float]]) -> float:
    """Largest difference from `GOLDEN`, as a share of its largest number; infinite if shapes differ or one is NaN."""
    if [len(row) for row in logits] != [len(row) for row in GOLDEN]:
        return float("inf")
    pairs = [pair for row, golden in zip(logits, GOLDEN, strict=True) for pair in zip(row, golden, strict=True)]
    differences = [abs(one - other) for one, other in pairs]
    if any(map(math.isnan, differences)):
        return float("inf")
    return max(differences) / max(abs(golden) for row in GOLDEN for golden in row)
