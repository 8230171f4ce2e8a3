"""Overrides of a configuration: values by path, after the file, as by NxD Inference's `load(path, **kwargs)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln_client.documents import parse_value
from kiln_client.errors import DocumentInvalid, OverrideInvalid


@dataclass(frozen=True, slots=True)
class Override:
    """One value in place of another.

    Attributes:
        path: Names from the top level to the value, such as `("neuron_config", "seq_len")`.
        value: JSON's types.
    """

    path: tuple[str, ...]
    value: Any


def parse_override(text: str) -> Override:
    """Reads `neuron_config.seq_len=256`; the value is YAML.

    Raises:
        OverrideInvalid: There is no path or no `=`, or the value is no YAML.
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
    """The document with the overrides applied, in order; it is left as it was.

    What an override names is replaced as a whole. Objects on the way there are made where nothing is; which names there
    are is for the server to judge.

    Raises:
        OverrideInvalid: A path leads through a value that is no object.
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
        # A copy: the caller's document, and what YAML anchors share, stay as they are.
        place[name] = dict(inner or {})
        place = place[name]
    place[last] = override.value
