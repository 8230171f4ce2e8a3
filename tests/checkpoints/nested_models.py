"""Small random checkpoints of models that take images, too, with transformers as the oracle of their text models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers

from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.ropes import ROPES
from tests.checkpoints.tiny_models import TinyModel

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "sliding_window": 11,
}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

#: Arguments of the architecture's configuration in transformers.
NESTED: Final[dict[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": {
        "text_config": _TEXT
        | {
            "head_dim": 20,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": ROPES["linear"], "sliding_attention": ROPES["default"]},
        },
        "vision_config": _VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": _TEXT | {"model_type": "mistral", "head_dim": 12},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16},
        "tie_word_embeddings": False,
    },
}


def write_nested_model(path: Path, architecture: str, **text_attributes: Any) -> TinyModel:
    """Writes a random checkpoint of a model with its part for images; see `write_tiny_model`."""
    arguments = NESTED[architecture]
    reference = getattr(transformers, architecture)
    torch.manual_seed(7)
    config = reference.config_class(**arguments | {"text_config": arguments["text_config"] | text_attributes})
    model = reference(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(path)
    return TinyModel(model, Checkpoint.open(path))
