"""Reads exported programs from files, faster than torch does."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._export.serde import schema, serialize
from torch.export import ExportedProgram


def read_program(path: Path) -> ExportedProgram:
    """Reads a program that `torch.export.save` wrote. torch raises many kinds of exceptions if the file is none."""
    with path.open("rb") as file, _remembered_type_hints():
        return torch.export.load(file)


@contextmanager
def _remembered_type_hints() -> Iterator[None]:
    """Inside the block, torch evaluates the type hints of its file format once.

    Otherwise it evaluates them for every value of a file, which is two thirds of the time of reading.
    """
    remembering = SimpleNamespace(**vars(typing) | {"get_type_hints": _find_type_hints})
    vars(serialize)["typing"] = remembering
    try:
        yield
    finally:
        vars(serialize)["typing"] = typing


def _find_type_hints(kind: type, *, globalns: dict[str, Any]) -> dict[str, Any]:
    return _known_type_hints(kind) if globalns is vars(schema) else typing.get_type_hints(kind, globalns=globalns)


@cache
def _known_type_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, globalns=vars(schema))
