"""transformers as the numeric oracle: random checkpoints, logits and greedy tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

#: A different token counts as a tie where the reference's two best logits are closer than this share of the largest.
TIE = 2e-4

GEOMETRIES: dict[str, dict[str, Any]] = {
    "gqa-llama3-tied": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mha-bias-untied": {
        "hidden_size": 48,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mqa-head-dim-linear": {
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
    },
}


@dataclass(frozen=True)
class Reference:
    """A model of transformers and where its checkpoint lies."""

    path: Path
    model: LlamaForCausalLM

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits f32 [len(ids), V]."""
        return self.model(torch.tensor([ids])).logits[0].float()

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int) -> tuple[list[int], list[bool]]:
        """Greedy continuation, and for each token whether it was a tie."""
        tokens, ties, cache, step = [], [], None, torch.tensor([ids])
        for _ in range(count):
            output = self.model(step, past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[0, -1].float()
            best = logits.topk(2).values
            tokens.append(int(logits.argmax()))
            ties.append(bool(best[0] - best[1] < TIE * logits.abs().max()))
            step = torch.tensor([[tokens[-1]]])
        return tokens, ties


def write_checkpoint(path: Path, geometry: str, *, dtype: torch.dtype = torch.float32) -> Reference:
    """Writes a random checkpoint whose logits are spread enough for greedy decoding to be decisive."""
    torch.manual_seed(len(geometry))
    config = LlamaConfig(
        vocab_size=211,
        num_hidden_layers=3,
        max_position_embeddings=512,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **GEOMETRIES[geometry],
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    return Reference(path, model)


def assert_same_tokens(actual: list[int], expected: list[int], ties: list[bool]) -> int:
    """Equal up to the first tie; returns 1 where a tie ended the comparison, otherwise 0."""
    for position, (got, want) in enumerate(zip(actual, expected, strict=True)):
        if got != want:
            assert ties[position], f"token {position}: {got} instead of {want}, and it is no tie"
            return 1
    return 0
