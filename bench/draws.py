"""How long draws take: by noise, and by the inverse distribution function of bundles of earlier releases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import truediv
from typing import Final

import torch
from torch import Tensor

from bench.measurements import Measurements
from bench.tables import Row, count_streams, render_table
from bench.worker import median
from execution.sampling import draw

#: Candidates of a row: those of the default limit, and all of a vocabulary.
_CANDIDATES: Final = (256, 32_000)
_REPEATS: Final = 200
_INVERSE: Final = "inverse"
_NOISE: Final = "noise"


def measure_draws(measured: Measurements, batches: tuple[int, ...]) -> None:
    """Adds a round of the draws' seconds, compiled for this host as executables are."""
    compiled = torch.compile(draw, fullgraph=True, dynamic=False)
    for count, batch in _list_sizes(batches):
        ids = torch.arange(count, dtype=torch.int32).expand(batch, count).contiguous()
        scores = torch.linspace(0, -20, count).expand(batch, count).contiguous()
        sampling_params = torch.tensor([[0.0, 1.0, 1.0]]).repeat(batch, 1)
        chances = {_NOISE: torch.arange(2 * batch, dtype=torch.int32).view(batch, 2), _INVERSE: torch.rand(batch, 1)}
        for kind, chance in chances.items():
            arguments = (ids, scores, sampling_params, chance)
            compiled(*arguments)
            measured.add(f"{kind}.{count}.{batch}", median([_time(compiled, arguments) for _ in range(_REPEATS)]))


def render_draws(measured: Measurements, batches: tuple[int, ...]) -> str:
    """Renders the section of the draws."""
    rows: list[Row] = []
    for count, batch in _list_sizes(batches):
        noise, inverse = (f"{kind}.{count}.{batch}" for kind in (_NOISE, _INVERSE))
        times = tuple(f"{measured.typical(name) * 1e6:.0f} µs" for name in (noise, inverse))
        rows.append((count_streams(batch), str(count), *times, f"{measured.relate(truediv, noise, inverse):.2f}"))
    head = ("rows", "candidates of each", "by noise", "by the inverse distribution function", "ratio")
    return "## The draw alone\n\n" + render_table(head, rows)


def _time(call: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> float:
    began_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began_s


def _list_sizes(batches: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return ((count, batch) for count in _CANDIDATES for batch in batches)
