"""Submodels that Neuron's packages refuse, or whose graphs neuronx-cc would refuse, each for one reason.

Each function takes the document of a token_generation submodel and changes what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from compiler_svc.lower.neuron.submodel import Submodel
from compiler_svc.trace.named_submodel import make_named_submodel

Outputs = tuple[Tensor, ...]
Make = Callable[[dict[str, Any]], Submodel]


class Changed(nn.Module):
    """The submodel with another forward, which may compute the submodel's own."""

    def __init__(self, module: nn.Module, change: Callable[[Changed, Mapping[str, Tensor]], Outputs]) -> None:
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        self.__dict__["compute"] = module
        self._change = change

    def forward(self, input_ids=None, position_ids=None, seq_ids=None):  # type: ignore[no-untyped-def]
        return self._change(self, {"input_ids": input_ids, "position_ids": position_ids, "seq_ids": seq_ids})


def changed(change: Callable[[Any, Mapping[str, Tensor]], Outputs]) -> Make:
    def make(document: dict[str, Any]) -> Submodel:
        made = make_named_submodel(document)
        return replace(made, module=Changed(made.module, change))

    return make


@changed
def _make_unused(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    return module.compute(**{**inputs, "seq_ids": torch.zeros_like(inputs["position_ids"])[:, 0]})


def make_unused(document: dict[str, Any]) -> Submodel:
    made = _make_unused(document)
    return replace(made, examples=dict(made.examples) | {"seq_ids": torch.zeros(3, dtype=torch.int32)})


@changed
def make_double(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    return ((module.compute(**inputs)[0].double() * 2).float(),)


@changed
def make_integer_power(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    return (module.compute(**inputs)[0] + torch.pow(inputs["seq_ids"].long(), 3).float()[:, None],)


@changed
def make_in_place(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    outputs = module.compute(**inputs)
    module.get_buffer("k_cache.0").mul_(2)
    return outputs


@changed
def make_lasting_buffer(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    before = module.get_buffer("k_cache.0")
    outputs = module.compute(**inputs)
    module.get_submodule("k_cache").__dict__["_buffers"]["0"] = before
    return outputs


def make_read_buffer(document: dict[str, Any]) -> Submodel:
    """No fault: it says that it leaves the buffer as it is."""
    return replace(make_lasting_buffer(document), reads=frozenset({"k_cache.0"}))


@changed
def make_written_buffer(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    module.get_buffer("k_cache.0").mul_(2)
    return module.compute(**inputs)


@changed
def make_fallback(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    logits = module.compute(**inputs)[0]
    return ((logits.mT @ logits).det(),)


@changed
def make_refused_operator(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    return (module.compute(**inputs)[0].split([3, 5], -1)[0],)


@changed
def make_unnamed_output(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    outputs = module.compute(**inputs)
    return (*outputs, outputs[0] + 1)


@changed
def _make_other_weight(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    return (module.compute(**inputs)[0] * module.stranger,)


def make_other_weight(document: dict[str, Any]) -> Submodel:
    made = _make_other_weight(document)
    made.module.register_parameter("stranger", nn.Parameter(torch.ones(1)))
    return made


@changed
def make_hungry(module: Any, inputs: Mapping[str, Tensor]) -> Outputs:
    bytearray(1 << 45)
    return module.compute(**inputs)


class Variadic(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return tensors[0]


def make_variadic(document: dict[str, Any]) -> Submodel:
    return replace(make_named_submodel(document), module=Variadic())


class Default(nn.Module):
    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Tensor:
        return input_ids * scale


def make_default(document: dict[str, Any]) -> Submodel:
    return replace(make_named_submodel(document), module=Default())


def make_nothing(document: dict[str, Any]) -> Submodel:
    raise ZeroDivisionError(document["submodel"]["tag"])
