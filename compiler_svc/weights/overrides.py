"""Replaces model attributes in a checkpoint's JSON by those of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compiler_svc.models.registry import find_attribute_names, list_attributes
from compiler_svc.models.token_ids import TOKEN_ID_NAMES
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.rope_overrides import find_rope_changes, list_rope_names, replace_ropes


def override_checkpoint(
    checkpoint: Checkpoint, attributes: Mapping[str, Any], attribute_map: Mapping[str, str]
) -> Checkpoint:
    """The checkpoint as if its JSON had the given attributes, and its own ones under the names in `attribute_map`.

    Attributes go by name, not alias; null removes one from the checkpoint. `attribute_map` maps aliases to names.
    """
    config = override_config(checkpoint.config, attributes, attribute_map)
    # transformers prefers the token ids in `generation_config.json`.
    ids = {name: attributes[name] for name in TOKEN_ID_NAMES if name in attributes}
    return replace(checkpoint, config=config, generation_config={**checkpoint.generation_config, **ids})


def override_config(
    config: Mapping[str, Any], attributes: Mapping[str, Any], attribute_map: Mapping[str, str]
) -> dict[str, Any]:
    """A `config.json` with the given attributes, as `override_checkpoint` gives them to a checkpoint."""
    return _replace(_name_originals(config, attribute_map), attributes)


def find_changes(
    checkpoint: Checkpoint, attributes: Mapping[str, Any], attribute_map: Mapping[str, str]
) -> dict[str, Any]:
    """Finds the given attributes whose values differ from the checkpoint's; null equals a missing attribute."""
    config = _name_originals(checkpoint.config, attribute_map)
    synonyms, rope_names = find_attribute_names(config).list_synonyms, _list_rope_names(config)
    given = {name: attributes[name] for name in rope_names if name in attributes}
    rope = find_rope_changes(config, given, rope_names)

    def is_changed(name: str, value: object) -> bool:
        said = [config[one] for one in synonyms(name) if config.get(one) is not None]
        return any(one != value for one in said or [None])

    return {
        name: value
        for name, value in attributes.items()
        if (name in rope if name in rope_names else is_changed(name, value))
    }


def _list_rope_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    # Without an architecture, attributes of any family count.
    return list_rope_names(list_attributes(config) if config.get("architectures") else ())


def _name_originals(config: Mapping[str, Any], attribute_map: Mapping[str, str]) -> dict[str, Any]:
    renamed = {attribute_map[name]: value for name, value in config.items() if name in attribute_map}
    return renamed | {name: value for name, value in config.items() if name not in attribute_map}


def _replace(config: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    synonyms, rope_names = find_attribute_names(config).list_synonyms, _list_rope_names(config)
    # An attribute takes the place of what the file says under any of its names.
    hidden = {one for name in attributes for one in synonyms(name)}
    ropes = replace_ropes(config, {name: attributes[name] for name in rope_names if name in attributes}, rope_names)
    replaced = {name: value for name, value in config.items() if name not in hidden} | dict(attributes)
    return {name: value for name, value in replaced.items() if name not in rope_names} | ropes
