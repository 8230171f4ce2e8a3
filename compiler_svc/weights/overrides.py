"""Replaces model attributes in a checkpoint's JSON by those of a configuration.

transformers 5 keeps a rotary embedding under `rope_parameters`, transformers 4 under `rope_theta` and `rope_scaling`:
either form, if given, replaces the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from compiler_svc.models.registry import find_attribute_names
from compiler_svc.models.token_ids import TOKEN_ID_NAMES
from compiler_svc.weights.checkpoint import Checkpoint

_THETA: Final = "rope_theta"
_ROPE_NAMES: Final = (_THETA, "rope_scaling", "rope_parameters")


def override_checkpoint(
    checkpoint: Checkpoint, attributes: Mapping[str, Any], attribute_map: Mapping[str, str]
) -> Checkpoint:
    """The checkpoint as if its JSON had the given attributes, and its own ones under the names in `attribute_map`.

    Args:
        attributes: By name, not alias. null removes the attribute from the checkpoint.
        attribute_map: Alias → name.
    """
    config = _replace(_name_originals(checkpoint.config, attribute_map), attributes)
    # transformers prefers the token ids in `generation_config.json`.
    ids = {name: attributes[name] for name in TOKEN_ID_NAMES if name in attributes}
    return replace(checkpoint, config=config, generation_config={**checkpoint.generation_config, **ids})


def find_changes(
    checkpoint: Checkpoint, attributes: Mapping[str, Any], attribute_map: Mapping[str, str]
) -> dict[str, Any]:
    """Finds the given attributes whose values differ from the checkpoint's; null equals a missing attribute."""
    config = _name_originals(checkpoint.config, attribute_map)
    rope = _find_rope_changes(config, {name: attributes[name] for name in _ROPE_NAMES if name in attributes})
    synonyms = find_attribute_names(config).list_synonyms

    def is_changed(name: str, value: object) -> bool:
        said = [config[one] for one in synonyms(name) if config.get(one) is not None]
        return any(one != value for one in said or [None])

    return {
        name: value
        for name, value in attributes.items()
        if (name in rope if name in _ROPE_NAMES else is_changed(name, value))
    }


def _find_rope_changes(config: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    now, wanted = _read_rope(config), _read_rope(_replace(config, given))
    alone = {name: value for name, value in given.items() if _read_rope(_replace(config, {name: value})) != now}
    # One attribute may have an effect only together with another.
    return alone if _read_rope(_replace(config, alone)) == wanted else given


def _name_originals(config: Mapping[str, Any], attribute_map: Mapping[str, str]) -> dict[str, Any]:
    renamed = {attribute_map[name]: value for name, value in config.items() if name in attribute_map}
    return renamed | {name: value for name, value in config.items() if name not in attribute_map}


def _replace(config: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    # An attribute takes the place of what the file says under any of its names.
    synonyms = find_attribute_names(config).list_synonyms
    hidden = {one for name in attributes for one in synonyms(name)} - attributes.keys()
    replaced = {**{name: value for name, value in config.items() if name not in hidden}, **attributes}
    given = {name: attributes[name] for name in _ROPE_NAMES if name in attributes}
    # A value that is not an object keeps its own name, so that the model's reader reports it.
    if not given or not all(
        _is_rope(name, value) for name, value in {**config, **given}.items() if name in _ROPE_NAMES
    ):
        return replaced
    rope = _read_rope(config)
    theta = {_THETA: rope[_THETA]} if _THETA in rope else {}
    for name in ("rope_scaling", "rope_parameters"):
        if name in given:
            rope = theta | _read_kind(given[name])
    if _THETA in given:
        rope[_THETA] = given[_THETA]
    return {name: value for name, value in replaced.items() if name not in _ROPE_NAMES} | {"rope_parameters": rope}


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a rotary embedding of either form in the form of transformers 5, without unset values."""
    nested = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = {} if config.get(_THETA) is None else {_THETA: config[_THETA]}
    return theta | _read_kind(nested) if isinstance(nested, Mapping) else theta


def _read_kind(nested: Mapping[str, Any] | None) -> dict[str, Any]:
    values = {name: value for name, value in (nested or {}).items() if value is not None}
    kind = values.pop("type", "default")
    return {"rope_type": kind} | values


def _is_rope(name: str, value: object) -> bool:
    return name == _THETA or value is None or isinstance(value, Mapping)
