"""`kiln::adapt`, what LoRA adapters add to the outputs of a linear layer: of each row, another adapter, or none.

Importing this module registers it. What it does here is the reference for kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCHEMA = "adapt(Tensor input, Tensor a, Tensor b, Tensor adapter_ids) -> Tensor"


def add_adapters(input: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    """Multiplies each row of inputs [rows, …, inputs] by the A and then by the B of its adapter.

    `a` has the adapters' slots, [slots, rank, inputs], and `b` too, [slots, outputs, rank], both in the dtype of the
    input; `adapter_ids`, int32 [rows], says each row's slot, -1 for none. Returns [rows, …, outputs], zeros in rows
    without an adapter. Sums are float32. A x is rounded once, to the dtype of the input, and so is B (A x).

    Rows without an adapter cost nothing. A row's results depend on the row and its adapter alone, not on other rows.
    """
    rows = input.reshape(input.shape[0], -1, input.shape[-1])
    added = rows.new_zeros((*rows.shape[:2], b.shape[1]))
    for slot in sorted({*adapter_ids.tolist()} - {-1}):
        own = (adapter_ids == slot).nonzero()[:, 0]
        added[own] = _multiply(_multiply(rows[own], a[slot]), b[slot])
    return added.view(*input.shape[:-1], b.shape[1])


def _multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """Each of [rows, tokens, inputs] by itself times [outputs, inputs]: as one product, its bits would go by how many
    they are.
    """
    wide = matrix.to(torch.float32).t().expand(len(rows), -1, -1)
    return torch.bmm(rows.to(torch.float32), wide).to(rows.dtype)


def _fake(input: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    slots, rank, inputs = a.shape
    assert (input.shape[-1], b.shape[0], b.shape[2]) == (inputs, slots, rank), f"{a.shape} and {b.shape} do not fit"
    assert adapter_ids.shape == input.shape[:1], f"{adapter_ids.shape} adapters of {input.shape} inputs"
    return input.new_empty((*input.shape[:-1], b.shape[1]))


_LIBRARY = torch.library.Library("kiln", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides))  # type: ignore[no-untyped-call]
_LIBRARY.impl("adapt", add_adapters, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("kiln::adapt", _fake, lib=_LIBRARY)
