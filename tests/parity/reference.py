"""transformers as the numeric oracle: random checkpoints, logits and greedy tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.checkpoints.tiny_models import TIE, compute_step_logits, write_tiny_model
from tests.parity.geometries import ARCHITECTURES, GEOMETRIES


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens after a prompt.

    Attributes:
        ties: Whether a token's logit was as good as equal to the next best.
        logits: What each token was picked from, f32 [V] each.
    """

    tokens: list[int]
    ties: list[bool]
    logits: list[torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """A model of transformers and the directory of its checkpoint."""

    path: Path
    model: PreTrainedModel
    _greedy: dict[tuple[int, ...], Continuation] = field(default_factory=dict)

    def step_logits(self, ids: list[int], num_prompt_tokens: int) -> torch.Tensor:
        """See `compute_step_logits`."""
        return compute_step_logits(self.model, ids, num_prompt_tokens)

    def greedy(self, ids: list[int], count: int) -> Continuation:
        """At least this many greedy tokens, computed once for each prompt."""
        known = self._greedy.get(tuple(ids))
        if known is None or len(known.tokens) < count:
            known = self._greedy[tuple(ids)] = self._generate(ids, count)
        return known

    @torch.no_grad()
    def _generate(self, ids: list[int], count: int) -> Continuation:
        # A dynamic rope keeps the frequencies of the longest sequence that it has seen, until it sees a short one.
        self.model(torch.tensor([[1]]), use_cache=False)
        known = Continuation([], [], [])
        cache, step = None, torch.tensor([ids])
        for _ in range(count):
            output = self.model(step, past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[0, -1].float()
            best = logits.topk(2).values
            known.tokens.append(int(logits.argmax()))
            known.ties.append(bool(best[0] - best[1] < TIE * logits.abs().max()))
            known.logits.append(logits)
            step = torch.tensor([known.tokens[-1:]])
        return known


def write_checkpoint(path: Path, geometry: str) -> Reference:
    """Writes a random checkpoint whose logits are spread enough for greedy decoding to be decisive."""
    tiny = write_tiny_model(path, GEOMETRIES[geometry], architecture=ARCHITECTURES[geometry], seed=len(geometry))
    return Reference(path, tiny.model)


def draw_prompt(length: int, *, seed: int = 0) -> list[int]:
    """Random tokens, none of them special; another prompt for every length and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 211, (length,), generator=generator).tolist()


def assert_same_tokens(actual: list[int], expected: Continuation) -> int:
    """Asserts that tokens are equal up to the first tie; returns how many were, all of them if there was no tie."""
    for position, (got, want) in enumerate(zip(actual, expected.tokens, strict=False)):
        if got != want:
            assert expected.ties[position], f"token {position}: {got} instead of {want}, and it is no tie"
            return position
    assert len(expected.tokens) >= len(actual)
    return len(actual)
