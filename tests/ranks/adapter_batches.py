"""Steps of ranks in which each row has an adapter of its own, or none."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from compiler_svc.models.description import ModelDescription
from compiler_svc.models.parameters import ParameterSpec
from compiler_svc.trace.graph_spec import GraphSpec
from tests.checkpoints.tiny_models import TinyModel, draw_tokens
from tests.ranks.stepping import Stepper, run_eagerly
from tests.ranks.threads import run_ranks

#: Of five adapters, in the order of their slots; the largest is all that there is room for.
RANKS: Final = (3, 16, 1, 2, 5)
#: The slot of each row, and how many tokens of its sequence are its prompt.
ROWS: Final = ((3, 11), (-1, 5), (0, 16), (4, 1), (1, 9), (2, 7))
NUM_LATER: Final = 3
SEQUENCES: Final = [draw_tokens(length + NUM_LATER, seed=row) for row, (_, length) in enumerate(ROWS)]


def draw_adapters(description: ModelDescription, seed: int = 0) -> dict[str, Tensor]:
    """Whole A and B of each slot, with zeros behind the ranks that an adapter has."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for spec in description.adapter_parameters():
        tensor = torch.randn(spec.shape, generator=generator) / spec.shape[-1] ** 0.5
        for slot, rank in enumerate(RANKS):
            (tensor[slot] if spec.name.endswith("lora_A") else tensor[slot].t())[rank:] = 0
        drawn[spec.name] = tensor
    return drawn


def cut(spec: ParameterSpec, whole: Tensor, rank: int, tp_degree: int) -> Tensor:
    """What a rank holds of a tensor."""
    axis = spec.divided_axis()
    if axis is None:
        return whole
    shape = list(whole.shape)
    parts = []
    for run in spec.axes[axis].divide(tp_degree)[rank]:
        shape[axis] = run.length
        parts.append(whole.new_zeros(shape) if run.start is None else whole.narrow(axis, run.start, run.length))
    return torch.cat(parts, axis)


def generate(stepper: Stepper, slots: Tensor | None) -> Tensor:
    """Logits of all rows, [steps, rows, vocabulary]: of prompts together, then of later tokens; each row is a slot."""
    extra = {} if slots is None else {"adapter_ids": slots}
    prompts = {row: SEQUENCES[row][:length] for row, (_, length) in enumerate(ROWS)}
    logits = [stepper.prefill(prompts, **extra)["logits"]]
    for step in range(NUM_LATER):
        tokens = {row: (SEQUENCES[row][length + step], length + step) for row, (_, length) in enumerate(ROWS)}
        logits.append(stepper.decode(tokens, **extra)["logits"])
    return torch.stack(logits)


def generate_on_ranks(
    tiny: TinyModel, spec: GraphSpec, adapters: dict[str, Tensor], slots: Tensor | None, make_run: Any = run_eagerly
) -> list[Tensor]:
    parameters = spec.description.adapter_parameters()
    plan = tiny.plan(tp_degree=spec.tp_degree, dtype=spec.dtype, description=spec.description)
    steppers = [
        Stepper(
            spec,
            plan,
            tiny.checkpoint,
            context_buckets=(16,),
            token_buckets=(32,),
            make_run=make_run,
            rank=rank,
            adapters={one.name: cut(one, adapters[one.name], rank, spec.tp_degree) for one in parameters},
        )
        for rank in range(spec.tp_degree)
    ]
    for stepper in steppers:
        stepper.prepare()
    return run_ranks(spec.tp_degree, lambda rank: generate(steppers[rank], slots))
