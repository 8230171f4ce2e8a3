"""Numbers of one random model, computed by chunks and by single tokens, beside transformers'."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.ranks.stepping import Run, Stepper, run_eagerly
from tests.ranks.threads import run_ranks

#: Tokens of a step of prompts.
CHUNK: Final = 16
_BUCKET: Final = 64


def make_stepper(
    tiny: TinyModel,
    make_run: Callable[..., Run] = run_eagerly,
    *,
    context_buckets: tuple[int, ...] = (16, 64),
    token_buckets: tuple[int, ...] = (24, 128),
    **options: Any,
) -> Stepper:
    """Runs a model of one rank; other keywords are those of its graphs."""
    buckets = {"context_buckets": context_buckets, "token_buckets": token_buckets}
    return Stepper(tiny.spec(**options), tiny.plan(), tiny.checkpoint, make_run=make_run, **buckets)


def check_numbers(
    architecture: str, attributes: dict[str, Any], *, num_prompt_tokens: int, num_tokens: int, tp_degree: int = 1
) -> None:
    """Asserts that logits after a prompt and after each later token are transformers'.

    Args:
        attributes: Of the architecture's configuration in transformers, the size of the vocabulary among them.
        num_tokens: Tokens of the sequence, those of its prompt included.
    """
    with tempfile.TemporaryDirectory() as path:
        tiny = write_tiny_model(Path(path), attributes, architecture=architecture)
        tokens = draw_tokens(num_tokens, vocab_size=attributes["vocab_size"])
        expected = tiny.step_logits(tokens, num_prompt_tokens)
        spec = tiny.spec(tp_degree=tp_degree, reads_context=True, skips_idle=True, largest_step=CHUNK)
        plan = tiny.plan(tp_degree=tp_degree)
        steppers = [
            Stepper(spec, plan, tiny.checkpoint, context_buckets=(CHUNK,), token_buckets=(_BUCKET,), rank=rank)
            for rank in range(tp_degree)
        ]
        for logits in run_ranks(tp_degree, lambda rank: _compute(steppers[rank], tokens, num_prompt_tokens)):
            assert deviation(logits, expected) < TOLERANCE


def _compute(stepper: Stepper, tokens: list[int], num_prompt_tokens: int) -> torch.Tensor:
    """Logits f32 [1 + later tokens, vocab_size] of a sequence in slot 1 and row 0."""

    def run(start: int, stop: int) -> torch.Tensor:
        row = {0: (tokens[start:stop], start, (1,))}
        is_prompt = start < num_prompt_tokens
        kind, bucket = ("context_encoding", CHUNK) if is_prompt else ("token_generation", _BUCKET)
        return stepper.run(kind, bucket, row, num_prompt_tokens=num_prompt_tokens)["logits"][0]

    chunks = [run(start, min(start + CHUNK, num_prompt_tokens)) for start in range(0, num_prompt_tokens, CHUNK)]
    return torch.stack([chunks[-1], *(run(start, start + 1) for start in range(num_prompt_tokens, len(tokens)))])
