"""The model that is measured: a random Llama, large enough that weights do not fit the caches."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TOKENIZER = Path(__file__).parents[1] / "examples/models/kiln-tiny"


def write_checkpoint(path: Path) -> LlamaForCausalLM:
    """Writes 115 M random f32 parameters, with the tokenizer of the examples."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=10,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(path)
    return model
