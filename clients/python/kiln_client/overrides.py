"""Overrides of a configuration: values by path that replace those of the file, as in NxD Inference's
`load(path, **kwargs)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln_client.documents import parse_value
from kiln_client.errors import DocumentInvalid, OverrideInvalid


@dataclass(frozen=True, slots=True)
class Override:
    """One value that replaces another.

    Attributes:
        path: Names from the top level to the value, such as `("neuron_config", "seq_len")`.
        value: A value of JSON's types.
    """

    path: tuple[str, ...]
    value: Any


def parse_override(text: str) -> Override:
    """Reads `neuron_config.seq_len=256`; the value is YAML.

    Raises:
        OverrideInvalid: The path or the `=` is missing, or the value is not YAML.
    """
    path, equals, value = text.partition("=")
    names = tuple(path.strip().split("."))
    if not equals or not all(names):
        raise OverrideInvalid(text, f"got {text!r}; accepted: PATH=VALUE, such as neuron_config.seq_len=256")
    try:
        parsed = parse_value(value, source="-", reason="CONFIG_INVALID", field="override", infinities=True)
    except DocumentInvalid as error:
        raise OverrideInvalid(text, f"got {value!r}; accepted: a value in YAML or JSON ({error.message})") from None
    return Override(names, parsed)


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns a copy of the document with the overrides applied in order.

    An override replaces a whole value and creates missing objects on the way to it. The server validates their names.

    Raises:
        OverrideInvalid: A path leads through a value that is not an object.
    """
    changed = dict(document)
    for override in overrides:
        _replace(changed, override)
    return changed


def _replace(document: dict[str, Any], override: Override) -> None:
    place = document
    *way, last = override.path
    for depth, name in enumerate(way):
        inner = place.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            outer = ".".join(way[: depth + 1])
            raise OverrideInvalid(".".join(override.path), f"got {inner!r} at {outer}; accepted: an object there")
        # Copied, so that the caller's document, and objects that YAML anchors share, do not change.
        place[name] = dict(inner or {})
        place = place[name]
    place[last] = override.value
