"""`kiln::quantized_linear`, a linear layer whose matrix is items and scales; see `bundle.abi.formats`.

Importing this module registers it. What it does here is the reference for kernels, and what devices run: it keeps the
order of NxD Inference, which multiplies by the items and scales the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bundle.abi.formats import ActivationFormat
from execution.dtypes import TORCH_DTYPES

_SCHEMA = "quantized_linear(Tensor input, Tensor items, Tensor scales) -> Tensor"


def multiply_quantized(input: Tensor, items: Tensor, scales: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    """Multiplies […, inputs] by items [outputs, inputs] times scales, float32 [outputs] or [1], to […, outputs].

    Of groups, items are uint8 [outputs, inputs / 2] and scales [outputs, 2 groups]. Sums are float32, and rounded once,
    to the dtype of the input.
    """
    if items.dtype == torch.uint8:
        return functional.linear(input.to(torch.float32), dequantize(items, scales)).to(input.dtype)
    products = functional.linear(input.to(torch.float32), items.to(torch.float32))
    return (products * scales).to(input.dtype)


def quantize_rows(rows: Tensor, largest: Tensor, kind: ActivationFormat) -> tuple[Tensor, Tensor]:
    """Quantizes rows […, inputs], each by its largest magnitude, […, 1]; returns items in the dtype of the rows, and
    scales, float32 […, 1].

    Items are shares of `kind.unit`: all dtypes of activations hold them exactly, and float16 the sums of products.
    """
    scales = (largest.to(torch.float32) / kind.divisor).clamp(min=torch.finfo(torch.float32).tiny)
    items = rows.to(torch.float32) / scales
    if TORCH_DTYPES[kind.item].is_floating_point:
        items = items.clamp(*kind.bounds).to(TORCH_DTYPES[kind.item]).to(torch.float32)
    else:
        items = items.round().clamp(*kind.bounds)
    return (items / kind.unit).to(rows.dtype), scales * kind.unit


def dequantize(items: Tensor, scales: Tensor) -> Tensor:
    """The matrix that items and scales stand for, float32 [outputs, inputs]."""
    if items.dtype != torch.uint8:
        return items.to(torch.float32) * scales[:, None]
    outputs, num_scales = scales.shape
    pairs = items.view(outputs, -1, 16)
    codes = torch.stack([pairs & 15, pairs >> 4], 2).view(outputs, num_scales // 2, -1).to(torch.float32)
    factors, offsets = scales.view(outputs, -1, 1, 2).unbind(-1)
    return (codes * factors + offsets).view(outputs, -1)


def _fake(input: Tensor, items: Tensor, scales: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    accepted = {(1,), items.shape[:1]} if items.dtype != torch.uint8 else {(items.shape[0], scales.shape[-1])}
    assert scales.shape in accepted, f"{scales.shape} scales of {items.shape} items"
    return input.new_empty((*input.shape[:-1], items.shape[0]))


_LIBRARY = torch.library.Library("kiln", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides))  # type: ignore[no-untyped-call]
_LIBRARY.impl("quantized_linear", multiply_quantized, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("kiln::quantized_linear", _fake, lib=_LIBRARY)
