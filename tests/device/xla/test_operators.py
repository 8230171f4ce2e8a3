"""Operators of a compiler take the place of those that graphs have otherwise, until the block ends."""

from __future__ import annotations

import torch
import torch_xla

from compiler_svc.lower.xla import register_operators
from execution.candidates import find_likeliest, take_top
from tests.device.xla.traces import one_graph


def take_last_of_equals(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    backwards = values.flip(-1).sort(dim=-1, descending=True, stable=True)
    return backwards.values[:, :count], (values.shape[-1] - 1 - backwards.indices[:, :count]).to(torch.int32)


def test_own_operators() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0, 1.0]])
    on_device = logits.to(torch_xla.device())
    calls = []

    def take(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(count)
        return take_last_of_equals(values, count)

    with register_operators(topk=take, argmax=lambda values: values.argmin(-1).to(torch.int32)):
        assert find_likeliest(on_device).cpu().tolist() == [3]
        with one_graph():
            top, ids = take_top(on_device, 4)
            torch_xla.sync(wait=True)
        assert calls == [4, 4]
    assert (top.tolist(), ids.tolist()) == ([[3.0, 3.0, 3.0, 1.0]], [[1, 2, 4, 0]])
    assert find_likeliest(on_device).cpu().tolist() == [1]
    assert calls == [4, 4]
