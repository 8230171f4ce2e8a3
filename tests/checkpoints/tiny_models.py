"""Small random checkpoints, with transformers as the oracle of what their models compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.specs import make_plan, make_spec

#: Largest deviation of a float32 logit, as a share of the largest reference logit.
TOLERANCE: Final = 1e-4
#: A different token is a tie if the reference's two best logits are closer than this share of the largest.
TIE: Final = 2e-4

ROPES: Final[dict[str, dict[str, Any]]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.4],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "partial_rotary_factor": 0.5,
    },
}

GEOMETRIES: Final[dict[str, dict[str, Any]]] = {
    "gqa-llama3-tied": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": ROPES["llama3"],
    },
    "mha-bias-untied": {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": ROPES["default"],
    },
    "mqa-head-dim-yarn": {
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPES["yarn"],
    },
}


@dataclass(frozen=True)
class TinyModel:
    """A model of transformers and its checkpoint."""

    model: PreTrainedModel
    checkpoint: Checkpoint

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits after each token, f32 [len(tokens), vocab_size]."""
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits.float()

    @torch.no_grad()
    def step_logits(self, tokens: list[int], num_prompt_tokens: int) -> torch.Tensor:
        """Logits after the prompt and after each later token, fed one by one as generation does."""
        output = self.model(torch.tensor([tokens[:num_prompt_tokens]]), use_cache=True)
        logits = [output.logits[0, -1]]
        for token in tokens[num_prompt_tokens:]:
            output = self.model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits[0, -1])
        return torch.stack(logits).float()

    def plan(self, **changes: Any) -> WeightPlan:
        return make_plan(self.checkpoint, **changes)

    def spec(self, **changes: Any) -> GraphSpec:
        return make_spec(self.checkpoint, **changes)


def write_tiny_model(
    path: Path,
    attributes: dict[str, Any],
    *,
    architecture: str = "LlamaForCausalLM",
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
) -> TinyModel:
    """Writes a random checkpoint whose logits are spread enough for greedy decoding to be decisive.

    Args:
        attributes: Of the architecture's configuration in transformers.
    """
    defaults = {
        "vocab_size": 211,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    reference = getattr(transformers, architecture)
    model = reference(reference.config_class(**(defaults | attributes))).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif "norm" in name or ".ln_" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(path)
    return TinyModel(model, Checkpoint.open(path))


def deviation(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, as a share of the largest reference logit."""
    return float((logits - reference).abs().max() / reference.abs().max())


def draw_tokens(count: int, *, seed: int = 0, vocab_size: int = 211) -> list[int]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()
