"""`kiln::argmax` and `kiln::topk` in graphs for Neuron, by custom calls of its compiler, which AWS names
and does not describe. Of the last axis `AwsNeuronArgMax` gives places, s64, and `AwsNeuronTopK` values and places, u32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from targets.neuron import RECORDED_TOP_K

_MAX_COLUMNS: Final = RECORDED_TOP_K[0].columns
#: Less than it is minus infinity alone.
_SMALLEST: Final = torch.finfo(torch.float32).min

Argmax = Callable[[Tensor], Tensor]
TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def make_operators(
    call_argmax: Argmax, call_top_k: TopK, max_count: int | None = None
) -> Mapping[str, Callable[..., Any]]:
    """Makes what `compiler_svc.lower.xla.register_operators` takes.

    `call_argmax` makes the call `AwsNeuronArgMax` of the last axis, f32 [N, M] to integers [N]; `call_top_k` makes the
    call `AwsNeuronTopK`, f32 [N, M] to f32 and integers [N, count]. One call takes at most `max_count` candidates.
    """

    def find_largest(values: Tensor) -> Tensor:
        return call_argmax(values).to(torch.int32)

    def take_once(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if values.shape[-1] <= _MAX_COLUMNS:
            largest, places = call_top_k(values, count)
            return largest, places.to(torch.int32)
        tops = []
        for start in range(0, values.shape[-1], _MAX_COLUMNS):
            # A copy, because torch-xla makes of a view here a gather by a table.
            part = torch.slice_copy(values, 1, start, start + _MAX_COLUMNS)
            largest, places = take_once(part, min(count, part.shape[-1]))
            tops.append((largest, places + start))
        largest, places = (torch.cat(parts, dim=1) for parts in zip(*tops, strict=True))
        largest, chosen = take_once(largest, count)
        return largest, places.gather(1, chosen)

    def take_largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if max_count is None or count <= max_count:
            return take_once(values, count)
        left, taken = values.clamp(min=_SMALLEST), []
        for start in range(0, count, max_count):
            _, places = take_once(left, min(max_count, count - start))
            taken.append(places)
            # What is taken is less than all that is left, so that no call takes it again.
            left = left.scatter(1, places, torch.full_like(places, -torch.inf, dtype=values.dtype))
        chosen = torch.cat(taken, dim=1)
        return values.gather(1, chosen), chosen

    return {"argmax": find_largest, "topk": take_largest}
