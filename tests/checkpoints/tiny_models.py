"""Small random checkpoints, with transformers as the oracle of what their models compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.shown_family import DEFAULTS
from tests.checkpoints.specs import make_plan, make_spec

#: Largest deviation of a float32 logit, as a share of the largest reference logit.
TOLERANCE: Final = 1e-4
#: A different token is a tie if the reference's two best logits are closer than this share of the largest.
TIE: Final = 2e-4

#: The models of the contract suite that tests of anything else take.
GEOMETRIES: Final = FAMILIES["LlamaForCausalLM"].geometries


@torch.no_grad()
def compute_step_logits(model: PreTrainedModel, tokens: list[int], num_prompt_tokens: int) -> torch.Tensor:
    """Logits f32 [1 + later tokens, vocab_size]: after the prompt, then after each token fed as generation does."""
    output = model(torch.tensor([tokens[:num_prompt_tokens]]), use_cache=True)
    logits = [output.logits[0, -1]]
    for token in tokens[num_prompt_tokens:]:
        output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0, -1])
    return torch.stack(logits).float()


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

    def step_logits(self, tokens: list[int], num_prompt_tokens: int) -> torch.Tensor:
        """See `compute_step_logits`."""
        return compute_step_logits(self.model, tokens, num_prompt_tokens)

    def plan(self, **changes: Any) -> WeightPlan:
        return make_plan(self.checkpoint, **changes)

    def spec(self, **changes: Any) -> GraphSpec:
        return make_spec(self.checkpoint, **changes)


def write_tiny_model(
    path: Path,
    attributes: Mapping[str, Any],
    *,
    architecture: str = "LlamaForCausalLM",
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
) -> TinyModel:
    """Writes a random checkpoint whose logits are spread enough for greedy decoding to be decisive.

    Args:
        attributes: Of the architecture's configuration in transformers.
    """
    torch.manual_seed(seed)
    reference = getattr(transformers, architecture)
    model = reference(reference.config_class(**(DEFAULTS | attributes))).to(dtype).eval()
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
