"""The training loop: next-token loss, optionally mixed with the distance to a teacher."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Schedule:
    """One training run. The learning rate warms up linearly and falls along a cosine to a tenth of its peak."""

    step_count: int
    peak_learning_rate: float
    warmup_step_count: int = 50
    batch_size: int = 8
    row_length: int = 256

    def learning_rate(self, step: int) -> float:
        """Returns the rate of 0-based `step`."""
        if step < self.warmup_step_count:
            return self.peak_learning_rate * (step + 1) / self.warmup_step_count
        progress = (step - self.warmup_step_count) / max(1, self.step_count - self.warmup_step_count)
        return self.peak_learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(
    model: LlamaForCausalLM,
    batches: Iterator[torch.Tensor],
    schedule: Schedule,
    emphasis: torch.Tensor,
    *,
    teacher: LlamaForCausalLM | None = None,
    turn: tuple[int, int] | None = None,
) -> float:
    """Trains `model` in place on int64 [batch, length] batches and returns the last smoothed loss in nats.

    `emphasis` weighs the targets: f32 [vocab]. With a teacher the loss is the cross-entropy against its distribution
    instead of against the text, so a small model spends its capacity on guessing what the teacher will say.

    With `turn`, the tokens that begin and end an answer, only what is between them counts: nothing can be learned from
    requests and tools that chance has drawn.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    smoothed, started_s = math.nan, time.monotonic()
    for step in range(schedule.step_count):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        batch = next(batches)
        loss = _loss(model, batch, emphasis[batch[:, 1:]] * _counts(batch, turn), teacher)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smoothed = loss.item() if step == 0 else 0.95 * smoothed + 0.05 * loss.item()
        if step % 50 == 0 or step == schedule.step_count - 1:
            print(f"  step {step:5d}  loss {smoothed:.3f}  {time.monotonic() - started_s:6.1f} s", flush=True)
    model.eval()
    return smoothed


def _counts(batch: torch.Tensor, turn: tuple[int, int] | None) -> torch.Tensor:
    """Tells which targets of a batch [N, T] count, f32 [N, T - 1]."""
    if turn is None:
        return torch.ones(batch[:, 1:].shape)
    begin, end = turn
    inputs = batch[:, :-1]
    place = torch.arange(inputs.shape[1]).expand_as(inputs)
    begun = place.where(inputs == begin, -1).cummax(-1).values
    ended = place.where(inputs == end, -1).cummax(-1).values
    return (begun > ended).float()


def _loss(
    model: LlamaForCausalLM, batch: torch.Tensor, weights: torch.Tensor, teacher: LlamaForCausalLM | None
) -> torch.Tensor:
    inputs, targets = batch[:, :-1], batch[:, 1:].flatten()
    logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
    if teacher is not None:
        with torch.no_grad():
            targets = teacher(input_ids=inputs, use_cache=False).logits.flatten(0, 1).softmax(-1)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()
