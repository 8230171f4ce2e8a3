"""Finds targets by kind, and executable formats by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from bundle.manifest import TargetKind
from targets.cpu import CPU
from targets.errors import FormatInvalid, FormatUnknown
from targets.neuron import INF2, TRN1, TRN2, TRN3
from targets.target import ExecutableFormat, Target

#: Every target, by kind.
TARGETS: Final[Mapping[TargetKind, Target]] = {target.kind: target for target in (CPU, INF2, TRN1, TRN2, TRN3)}

#: Group of the entry points of other distributions. The name is that of a format, the object its `ExecutableFormat`.
ENTRY_POINT_GROUP: Final = "kiln.executable_formats"

_LOWERINGS = (lowering for target in TARGETS.values() for lowering in target.lowerings)
_BUILT_IN: Final[Mapping[str, ExecutableFormat]] = {lowering.format.name: lowering.format for lowering in _LOWERINGS}


def find_format(name: str) -> ExecutableFormat:
    """Returns the executable format of a name: one of Kiln's, or one from an installed distribution's entry point."""
    found = _BUILT_IN.get(name)
    if found is None:
        found = _load_format(name)
    if found.executor is None:
        raise FormatUnknown(name, _list_runnable())
    return found


def _load_format(name: str) -> ExecutableFormat:
    installed = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not installed:
        raise FormatUnknown(name, _list_runnable())
    # A distribution that is installed twice, for example beside its sources, counts once.
    values = sorted({entry_point.value for entry_point in installed})
    if len(values) > 1:
        raise FormatInvalid(name, " and ".join(values), "both name the format")
    (entry_point, *_) = installed
    found = _load(entry_point)
    if not isinstance(found, ExecutableFormat):
        raise FormatInvalid(name, entry_point.value, f"is a {type(found).__name__}, not an ExecutableFormat")
    if found.name != name:
        raise FormatInvalid(name, entry_point.value, f"is the format {found.name}")
    return found


def _load(entry_point: EntryPoint) -> object:
    try:
        return entry_point.load()
    except Exception as error:
        detail = f"cannot be loaded: {type(error).__name__}: {error}"
        raise FormatInvalid(entry_point.name, entry_point.value, detail) from error


def _list_runnable() -> list[str]:
    runnable = [name for name, one in _BUILT_IN.items() if one.executor is not None]
    return [*runnable, *sorted({entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)})]
