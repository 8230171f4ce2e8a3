"""Logit processors on an XLA device: the numbers of the CPU, by operations that Neuron's compiler is on record with."""

from __future__ import annotations

import random

import pytest
import torch
import torch_xla

from execution.logit_changes import change_logits
from tests.device.xla.graphs import check_graph, read_graph
from tests.ranks.processed_rows import draw_asked, make_changes

VOCAB_SIZE = 70


@pytest.mark.parametrize("first", [None, 24])
def test_changed_logits(first: int | None) -> None:
    draw, device = random.Random(2), torch_xla.device()
    rows = [draw_asked(draw, VOCAB_SIZE) for _ in range(16)]
    logits = torch.randn(16, VOCAB_SIZE if first is None else 24, generator=torch.Generator().manual_seed(2)) * 5
    changes = make_changes(rows, VOCAB_SIZE)
    del changes["cuts"]
    first_id = None if first is None else torch.tensor([first], dtype=torch.int32)
    expected = change_logits(logits, changes, VOCAB_SIZE, first_id)
    inputs = {name: values.to(device) for name, values in (changes | {"logits": logits}).items()}
    own_id = None if first_id is None else first_id.to(device)
    changed = change_logits(inputs["logits"], inputs, VOCAB_SIZE, own_id)
    graph = read_graph([changed], inputs if own_id is None else inputs | {"first": own_id})
    check_graph(graph, ())
    assert changed.cpu().equal(expected)
