"""Converts protobuf enum values to the names that users write, lower case without the prefix, and back."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor

_ZERO = "UNSPECIFIED"


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """Returns `stop_token` for FINISH_REASON_STOP_TOKEN; for a value that the stubs do not know, the number as text."""
    value = enum.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(_prefix(enum)).lower()


def enum_names(enum: EnumDescriptor) -> list[str]:
    """Lists the names that `enum_number` accepts, in the order of the enum."""
    return [enum_name(enum, value.number) for value in enum.values if not value.name.endswith(_ZERO)]


def enum_number(enum: EnumDescriptor, name: str | None) -> int:
    """Returns the number of a name, or 0, the server's default, for None. Raises ValueError for an unknown name."""
    if name is None:
        return 0
    if name not in enum_names(enum):
        raise ValueError(f"{enum.name}: got {name!r}; accepted: {', '.join(enum_names(enum))}")
    return enum.values_by_name[_prefix(enum) + name.upper()].number


def _prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix(_ZERO)
