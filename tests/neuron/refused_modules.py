"""Submodels that Neuron's packages refuse, or whose graphs neuronx-cc would refuse, each for one reason.

Each function takes the document of a token_generation submodel and changes what is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from compiler_svc.lower.neuron.submodel import Submodel
from compiler_svc.trace.named_submodel import make_named_submodel


class Changed(nn.Module):
    """The submodel, with something done before and after."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        self.__dict__["_wrapped"] = module

    def forward(self, input_ids=None, position_ids=None, seq_ids=None):  # type: ignore[no-untyped-def]
        given = {"input_ids": input_ids, "position_ids": position_ids, "seq_ids": seq_ids}
        return self.change(self.__dict__["_wrapped"](**given), given)

    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        raise NotImplementedError


def make(document: dict[str, Any], kind: type[Changed]) -> Submodel:
    made = make_named_submodel(document)
    return replace(made, module=kind(made.module))


class Unused(Changed):
    def forward(self, input_ids=None, position_ids=None, seq_ids=None):  # type: ignore[no-untyped-def]
        wrapped = self.__dict__["_wrapped"]
        return wrapped(input_ids=input_ids, position_ids=position_ids, seq_ids=torch.zeros_like(position_ids)[:, 0])


def make_unused(document: dict[str, Any]) -> Submodel:
    made = make(document, Unused)
    return replace(made, examples=dict(made.examples) | {"seq_ids": torch.zeros(3, dtype=torch.int32)})


class Double(Changed):
    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return ((outputs[0].double() * 2).float(),)


def make_double(document: dict[str, Any]) -> Submodel:
    return make(document, Double)


class IntegerPower(Changed):
    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (outputs[0] + torch.pow(inputs["seq_ids"].long(), 3).float()[:, None],)


def make_integer_power(document: dict[str, Any]) -> Submodel:
    return make(document, IntegerPower)


class InPlace(Changed):
    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        self.get_buffer("k_cache.0").mul_(2)
        return outputs


def make_in_place(document: dict[str, Any]) -> Submodel:
    return make(document, InPlace)


class LastingBuffer(Changed):
    def forward(self, input_ids=None, position_ids=None, seq_ids=None):  # type: ignore[no-untyped-def]
        before = self.get_buffer("k_cache.0")
        outputs = self.__dict__["_wrapped"](input_ids=input_ids, position_ids=position_ids, seq_ids=seq_ids)
        self.get_submodule("k_cache").__dict__["_buffers"]["0"] = before
        return outputs


def make_lasting_buffer(document: dict[str, Any]) -> Submodel:
    return make(document, LastingBuffer)


class WrittenBuffer(Changed):
    def forward(self, input_ids=None, position_ids=None, seq_ids=None):  # type: ignore[no-untyped-def]
        self.get_buffer("k_cache.0").mul_(2)
        return self.__dict__["_wrapped"](input_ids=input_ids, position_ids=position_ids, seq_ids=seq_ids)


def make_written_buffer(document: dict[str, Any]) -> Submodel:
    return make(document, WrittenBuffer)


class Fallback(Changed):
    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (outputs[0].view(torch.int32).float(),)


def make_fallback(document: dict[str, Any]) -> Submodel:
    return make(document, Fallback)


class UnnamedOutput(Changed):
    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (*outputs, outputs[0] + 1)


def make_unnamed_output(document: dict[str, Any]) -> Submodel:
    return make(document, UnnamedOutput)


class OtherWeight(Changed):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.stranger = nn.Parameter(torch.ones(1))

    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (outputs[0] * self.stranger,)


def make_other_weight(document: dict[str, Any]) -> Submodel:
    return make(document, OtherWeight)


class Hungry(Changed):
    def change(self, outputs: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        bytearray(1 << 45)
        return outputs


def make_hungry(document: dict[str, Any]) -> Submodel:
    return make(document, Hungry)


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
