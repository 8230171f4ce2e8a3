"""Linear layers and embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import execution.adapters  # noqa: F401 - registers torch.ops.kiln.adapt
from bundle.abi.formats import ACTIVATION_FORMATS
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.step import StepTokens
from compiler_svc.models.parameters import ParameterSpec
from compiler_svc.models.specs import EmbeddingSpec, LinearSpec
from execution.quantized_linear import quantize_rows


class SharedInput:
    """The input of several layers, which is quantized once for all of them that quantize it alike."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self._quantized: dict[str, tuple[Tensor, Tensor]] = {}

    def quantize(self, kind: str, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Items and scales of its rows, as `quantize_rows` returns them; `ranks` divide the rows among them."""
        if kind not in self._quantized:
            largest = ranks.find_largest(self.hidden.abs().amax(-1, keepdim=True))
            self._quantized[kind] = quantize_rows(self.hidden, largest, ACTIVATION_FORMATS[kind])
        return self._quantized[kind]


class Adaptable(nn.Module):
    """A linear layer, or one of the parts of a fused layer, with the LoRA adapters that it has room for."""

    def __init__(self, spec: LinearSpec, ranks: Ranks) -> None:
        super().__init__()
        own = {one.name: make_parameter(one, ranks) for one in spec.adapter_parameters()}
        # What adapters add to a fused layer is in its parts.
        self.lora_A, self.lora_B = (own.get(f"{spec.name}.{kind}") for kind in ("lora_A", "lora_B"))

    def adapt(self, outputs: Tensor, hidden: Tensor, tokens: StepTokens | None) -> Tensor:
        """Adds to the layer's outputs [rows, …, outputs] what the adapter of each row makes of its input, `hidden`
        [rows, …, inputs]. If ranks divide the inputs, it is the rank's share of that.
        """
        if self.lora_A is None or self.lora_B is None:
            return outputs
        assert tokens is not None, "a layer with adapters is told of the step"
        assert tokens.adapter_ids is not None, "a graph with adapters takes adapter_ids"
        matrices = (cast(one, hidden.dtype) for one in (self.lora_A, self.lora_B))
        added: Tensor = torch.ops.kiln.adapt(hidden, *matrices, tokens.adapter_ids)
        return outputs + added


class Linear(Adaptable):
    """The one linear layer: outputs divided among ranks, inputs divided among ranks, or whole, as its spec says."""

    def __init__(self, spec: LinearSpec, ranks: Ranks) -> None:
        super().__init__(spec, ranks)
        parameters = {one.name.rpartition(".")[2]: make_parameter(one, ranks) for one in spec.parameters()}
        self.weight, self.bias, self.scale = parameters["weight"], parameters.get("bias"), parameters.get("scale")
        self.ranks = ranks
        self._activations = spec.activations
        self._sums_over_ranks = spec.inputs.is_divided and ranks.tp_degree > 1

    def forward(self, taken: Tensor | SharedInput, tokens: StepTokens | None = None) -> Tensor:
        """[…, inputs] to […, outputs]; of a divided axis the rank's part. Layers with adapters need `tokens`."""
        shared = taken if isinstance(taken, SharedInput) else SharedInput(taken)
        hidden = shared.hidden
        bias = None if self.bias is None else cast(self.bias, hidden.dtype)
        if self.scale is None and not self._sums_over_ranks:
            return self.adapt(functional.linear(hidden, cast(self.weight, hidden.dtype), bias), hidden, tokens)
        # Every rank holds the whole bias: it is added once, to the sum.
        total = self.adapt(self._multiply(shared), hidden, tokens)
        total = self.ranks.all_reduce(total) if self._sums_over_ranks else total
        return total if bias is None else total + bias

    def _multiply(self, shared: SharedInput) -> Tensor:
        hidden = shared.hidden
        if self.scale is None:
            return functional.linear(hidden, cast(self.weight, hidden.dtype))
        if not self._activations:
            return self._multiply_quantized(hidden)
        own = self.ranks if self._sums_over_ranks else replace(self.ranks, tp_degree=1)
        items, scales = shared.quantize(self._activations, own)
        return cast(self._multiply_quantized(items) * scales, hidden.dtype)

    def _multiply_quantized(self, rows: Tensor) -> Tensor:
        products: Tensor = torch.ops.kiln.quantized_linear(rows, self.weight, self.scale)
        return products


class Embedding(nn.Module):
    """Embeddings of tokens or positions. Their table may be divided among ranks along either axis."""

    def __init__(self, spec: EmbeddingSpec, ranks: Ranks) -> None:
        super().__init__()
        (table,) = spec.parameters()
        self.hidden_size = spec.hidden.length
        self.multiplier, self.rounds_multiplier = spec.multiplier, spec.rounds_multiplier
        self.ranks = ranks if spec.hidden.is_divided else replace(ranks, tp_degree=1)
        self.row_ranks = ranks if spec.vocabulary.is_divided else replace(ranks, tp_degree=1)
        self.weight = make_parameter(table, ranks)

    def forward(self, numbers: Tensor, dtype: torch.dtype, rank: Tensor | None = None) -> Tensor:
        """Rows of the table, int32 […], to […, hidden_size].

        `rank`, int32 [1], is which part of the vocabulary is in the table; None unless ranks divide it.
        """
        part = cast(self._look_up(numbers, rank), dtype)
        if self.multiplier != 1.0:
            part = part * (round_to(self.multiplier, dtype) if self.rounds_multiplier else self.multiplier)
        whole = self.ranks.all_gather(part)
        return whole if whole.shape[-1] == self.hidden_size else whole[..., : self.hidden_size]

    def _look_up(self, numbers: Tensor, rank: Tensor | None) -> Tensor:
        """The rows; of a vocabulary that ranks divide, the sum of the one rank's that has the row and of zeros."""
        if self.row_ranks.tp_degree == 1:
            return functional.embedding(numbers, self.weight)
        assert rank is not None, "a rank's part of the vocabulary has a number"
        places = numbers - rank * self.weight.shape[0]
        is_own = (places >= 0) & (places < self.weight.shape[0])
        rows = functional.embedding(torch.where(is_own, places, 0), self.weight)
        return self.row_ranks.sum_exactly(torch.where(is_own[..., None], rows, 0.0))


def make_parameter(spec: ParameterSpec, ranks: Ranks) -> nn.Parameter:
    """A rank's part of a tensor, uninitialized."""
    return nn.Parameter(torch.empty(spec.rank_shape(ranks.tp_degree)), requires_grad=False)


def round_to(number: float, dtype: torch.dtype) -> float:
    """The value of a float dtype that is nearest to a number; computed without a tensor, which a graph would keep."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; one that has it already adds no operation to the graph."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
