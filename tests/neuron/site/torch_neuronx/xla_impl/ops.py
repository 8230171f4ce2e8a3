"""Doubles of the operators of Neuron's compiler, by the recorded signatures.

Of a tensor on an XLA device they make the custom call that upstream makes, which nothing here can run. Of others they
compute what it would. Both take the last axis, as upstream's top-k does whatever its axis is called.
"""

from __future__ import annotations

import torch
from neuronx_distributed.recorded import as_recorded
from torch import Tensor

_MODULE = "torch_neuronx.xla_impl.ops"


class Argmax:
    @classmethod
    @as_recorded(_MODULE, "Argmax")
    def apply(cls, input: Tensor, dim: int, keepdim: bool) -> Tensor:  # noqa: A002 - upstream's name
        if input.device.type != "xla":
            return input.argmax(dim, keepdim)
        assert dim == input.dim() - 1
        (places,) = _call("AwsNeuronArgMax", input, {torch.int64: input.shape[:-1]}, str(dim))
        return places[..., None] if keepdim else places


class TopK:
    @classmethod
    @as_recorded(_MODULE, "TopK")
    def apply(cls, input: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:  # noqa: A002 - upstream's name
        assert dim in (-1, input.dim() - 1)
        if input.device.type != "xla":
            return tuple(input.topk(k, dim))
        shape = (*input.shape[:-1], k)
        values, places = _call("AwsNeuronTopK", input, {input.dtype: shape, torch.uint32: shape}, str(k))
        return values, places


def _call(target: str, operand: Tensor, results: dict[torch.dtype, tuple[int, ...]], config: str) -> list[Tensor]:
    from torch_xla import _XLAC  # noqa: PLC0415 - where there are XLA devices

    shapes, dtypes = [list(shape) for shape in results.values()], list(results)
    return _XLAC._xla_custom_call([operand], target, shapes, dtypes, False, config, 0, {})
