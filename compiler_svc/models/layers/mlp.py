"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from torch import Tensor, nn
from torch.nn import functional

from compiler_svc.models.layers.linear import Linear, SharedInput
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.step import StepTokens
from compiler_svc.models.specs import FeedForwardSpec, MlpSpec

#: By Hugging Face's names; `decoder_config.HIDDEN_ACTS` lists them without torch.
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_fast": partial(functional.gelu, approximate="tanh"),
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}


class GatedMlp(nn.Module):
    """Feed-forward layer with a gate: `down(act(gate(x)) * up(x))`."""

    def __init__(self, spec: MlpSpec, ranks: Ranks) -> None:
        super().__init__()
        self.act = ACTIVATIONS[spec.act]
        assert spec.gate is not None, f"{spec.up.name}: no gate"
        self.gate_proj = Linear(spec.gate, ranks)
        self.up_proj = Linear(spec.up, ranks)
        self.down_proj = Linear(spec.down, ranks)

    def forward(self, hidden: Tensor, tokens: StepTokens) -> Tensor:
        """[rows, tokens, hidden_size] to the same shape."""
        shared = SharedInput(hidden)
        gated = self.act(self.gate_proj(shared, tokens)) * self.up_proj(shared, tokens)
        activated: Tensor = self.down_proj(gated, tokens)
        return activated


class PlainMlp(nn.Module):
    """Feed-forward layer without a gate: `down(act(up(x)))`."""

    def __init__(self, spec: MlpSpec, ranks: Ranks) -> None:
        super().__init__()
        self.act = ACTIVATIONS[spec.act]
        self.up_proj = Linear(spec.up, ranks)
        self.down_proj = Linear(spec.down, ranks)

    def forward(self, hidden: Tensor, tokens: StepTokens) -> Tensor:
        """[rows, tokens, hidden_size] to the same shape."""
        activated: Tensor = self.down_proj(self.act(self.up_proj(hidden, tokens)), tokens)
        return activated


def make_feed_forward(spec: FeedForwardSpec, ranks: Ranks) -> nn.Module:
    """Makes the module of a feed-forward layer."""
    return PlainMlp(spec, ranks) if spec.gate is None else GatedMlp(spec, ranks)
