"""Fits an adapter to a model: finds the linear layers that it changes, checks it against them, and divides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Final, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from bundle.abi.tensor import DType
from bundle.digest import canonical_json, sha256_bytes
from bundle.errors import FieldViolation
from compiler_svc.adapters.errors import AdapterInvalid
from compiler_svc.adapters.files import Adapter, Kind, LowRank
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.sources import Sliced, Stored, join
from compiler_svc.models.specs import LinearSpec
from compiler_svc.models.surplus import ModelNames
from compiler_svc.sharding.plan import PlannedTensor, WeightPlan
from compiler_svc.sharding.writer import ByteSink, FileForm, write_tensors
from compiler_svc.weights.headers import CASTABLE_DTYPES
from compiler_svc.weights.unpacking import OpenedMatrix
from execution.dtypes import TORCH_DTYPES

#: A rank's file holds its tensors alone: who reads it writes each into a slot.
_FORM: Final = FileForm(alignment_bytes=1, metadata={})


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the checkpoint, and the linear layers that its outputs belong to."""

    name: str
    linears: tuple[LinearSpec, ...]
    num_outputs: int

    @property
    def has_room(self) -> bool:
        """Whether each of the layers has room for adapters."""
        return all(linear.adapters is not None for linear in self.linears)

    @property
    def slot_rank(self) -> int:
        """The largest rank that an adapter of it may have."""
        return min(linear.adapters.rank for linear in self.linears if linear.adapters is not None)

    def shape(self, kind: Kind, rank: int) -> tuple[int, int]:
        """The shape of one of the matrices that change it."""
        return (rank, self.linears[0].inputs.length) if kind == "lora_A" else (self.num_outputs, rank)


@dataclass(frozen=True, slots=True)
class _Change:
    """What an adapter changes of a module, with its scale."""

    module: Module
    matrices: LowRank
    scale: float

    def read(self, kind: Kind) -> Tensor:
        """A with the scale, or B: float32, in its own rank."""
        tensor = self.matrices.tensors[kind].to(torch.float32)
        return (tensor * self.scale if kind == "lora_A" else tensor).contiguous()


@dataclass(frozen=True, kw_only=True)
class FittedAdapter:
    """An adapter of one model, divided among ranks.

    Attributes:
        digest: Of the modules, shapes and values that it changes the model by: equal for equal adapters, whatever their
            files, and however slots and ranks divide them.
        plan: A and B of every linear layer that has room for adapters, as each rank holds them: `lora_A` [rank, inputs]
            and `lora_B` [outputs, rank] in the slots' rank, zeros where the adapter changes nothing.
    """

    digest: str
    plan: WeightPlan
    _reader: _Reader

    def write(self, sinks: Mapping[int, ByteSink]) -> int:
        """Writes the safetensors files of ranks, by their numbers. Returns the size of each in bytes."""
        return write_tensors(self.plan, self._reader, sinks, form=_FORM)


def fit_adapter(adapter: Adapter, description: ModelDescription, *, dtype: DType, tp_degree: int) -> FittedAdapter:
    """Fits an adapter to the layers of a model that have room for adapters, as tensors of `dtype` for each rank.

    Reads all of its values. Raises AdapterInvalid, which lists modules that the model lacks or that have no room,
    ranks, shapes and dtypes that do not fit, or the first value that `dtype` cannot hold.
    """
    modules = list_modules(description)
    names = ModelNames(description.storage, {f"{name}.weight" for name in modules})
    changes: dict[str, _Change] = {}
    mistakes: list[FieldViolation] = []
    for one in adapter.changes:
        found = names.find(f"{one.module}.weight")
        module = modules.get("" if found is None else found.removesuffix(".weight"))
        if module is None or not module.has_room:
            value = "no linear layer of the model" if module is None else "a layer without room for adapters"
            mistakes.append(FieldViolation(one.module, value, _list_targets(modules.values())))
        elif module.name in changes:
            other = changes[module.name].matrices.module
            mistakes.append(FieldViolation(one.module, "one more adapter of it", f"{other} alone"))
        else:
            rank, scale = adapter.config.find_rank(one.module), adapter.config.find_scale(one.module)
            mistakes += _list_mistakes(one, module, rank)
            changes[module.name] = _Change(module, one, scale)
    if mistakes:
        raise AdapterInvalid.listing(adapter.name, mistakes)
    reader = _Reader(adapter.name, changes)
    digest = reader.digest(dtype)
    planned = tuple(_plan(description, changes, dtype, tp_degree))
    return FittedAdapter(digest=digest, plan=WeightPlan(tp_degree, planned), _reader=reader)


def list_modules(description: ModelDescription) -> dict[str, Module]:
    """Every module of the checkpoint that linear layers have outputs of, by its name."""
    modules: dict[str, Module] = {}
    for part in _list_parts(description):
        name = description.find_module(part)
        known = modules.get(name, Module(name, (), 0))
        ends = (piece.start + piece.length for piece in part.list_stored("weight"))
        modules[name] = Module(name, (*known.linears, part), max(known.num_outputs, *ends))
    return modules


def _list_parts(description: ModelDescription) -> Iterator[LinearSpec]:
    """Every linear layer, or its parts if it has some."""
    return chain.from_iterable(linear.parts or (linear,) for linear in description.linears())


def _list_targets(modules: Iterable[Module]) -> str:
    """What adapters may change: the last parts of the names of modules that have room for them."""
    targets = dict.fromkeys(module.name.rpartition(".")[2] for module in modules if module.has_room)
    return f"adapters of {', '.join(targets)}" if targets else "none: no layer has room for adapters"


def _list_mistakes(matrices: LowRank, module: Module, rank: int) -> Iterator[FieldViolation]:
    if rank > module.slot_rank:
        yield FieldViolation(matrices.module, f"rank {rank}", f"at most {module.slot_rank}, the rank of the slots")
    for kind, tensor in matrices.tensors.items():
        name, shape = matrices.names[kind], module.shape(kind, rank)
        if tuple(tensor.shape) != shape:
            accepted = f"shape {list(shape)}, as the model and the adapter's configuration say"
            yield FieldViolation(name, f"shape {list(tensor.shape)}", accepted)
        stored = str(tensor.dtype).removeprefix("torch.")
        if stored not in CASTABLE_DTYPES:
            yield FieldViolation(name, f"dtype {stored}", f"one of {', '.join(CASTABLE_DTYPES)}")


def _plan(
    description: ModelDescription, changes: Mapping[str, _Change], dtype: DType, tp_degree: int
) -> Iterator[PlannedTensor]:
    """The tensors of one slot. Those that the adapter does not change keep their source, which is zeros."""
    for part in _list_parts(description):
        name = description.find_module(part)
        for spec in part.adapter_parameters():
            kind, source = spec.name.rpartition(".")[2], spec.source
            if name in changes:
                whole = Stored(f"{name}.{kind}")
                # All layers that share the module take the same inputs.
                rows = (Sliced(whole, one.start, one.length) for one in part.list_stored(kind))
                source = whole if kind == "lora_A" else join(*rows)
            yield PlannedTensor(replace(spec, axes=spec.axes[1:], source=source), spec.dtype or dtype, tp_degree)


class _Reader:
    """Reads an adapter's matrices in the slots' rank, as `sharding.values.Reader`, by the checkpoint's modules."""

    def __init__(self, path: Path, changes: Mapping[str, _Change]) -> None:
        self._path = path
        self._changes = changes
        #: Its ranks and parts take a matrix one after another.
        self.read = lru_cache(maxsize=2)(self._read)

    def _read(self, name: str) -> Tensor:
        change, kind = self._find(name)
        matrix = change.read(kind)
        missing = change.module.slot_rank - matrix.shape[0 if kind == "lora_A" else 1]
        return pad(matrix, (0, 0, 0, missing) if kind == "lora_A" else (0, missing))

    def _find(self, name: str) -> tuple[_Change, Kind]:
        module, _, kind = name.rpartition(".")
        return self._changes[module], "lora_A" if kind == "lora_A" else "lora_B"

    def unpack(self, _name: str) -> OpenedMatrix | None:
        """No matrix is quantized."""
        return None

    def trim(self) -> None:
        """Releases what it has read."""
        self.read.cache_clear()

    def digest(self, dtype: DType) -> str:
        """The digest of the adapter, all of whose values `dtype` can hold."""
        found = {}
        for module, change in sorted(self._changes.items()):
            for kind in change.matrices.names:
                values = change.read(kind)
                self._check_values(f"{module}.{kind}", values, dtype)
                digest = sha256_bytes(values.numpy().data.cast("B"))
                found[f"{module}.{kind}"] = {"shape": list(values.shape), "float32": digest}
        return sha256_bytes(canonical_json(found))

    def _check_values(self, name: str, values: Tensor, dtype: DType) -> None:
        # A comparison with NaN is false.
        invalid = (values.abs() <= torch.finfo(TORCH_DTYPES[dtype]).max).logical_not().nonzero()
        if len(invalid):
            place = invalid[0].tolist()
            change, kind = self._find(name)
            value = f"{float(change.matrices.tensors[kind][tuple(place)]):g} at {place}"
            scaled = f" with the scale {change.scale:g}" if kind == "lora_A" else ""
            self.refuse(name, f"{value}{scaled}", f"finite numbers of {dtype}")

    def check_finite(self, names: Iterable[str]) -> None:
        """Looks at values in float32."""
        for name in names:
            self._check_values(name, self.read(name), "float32")

    def refuse(self, name: str, value: str, accepted: str) -> NoReturn:
        """Raises the error of an adapter whose matrix has a value that is not accepted."""
        change, kind = self._find(name)
        raise AdapterInvalid(self._path, [FieldViolation(change.matrices.names[kind], value, accepted)])
