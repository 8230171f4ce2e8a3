"""The model families that this compiler builds: those of `families`, and those that other distributions register."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, Final

from compiler_svc.models import families
from compiler_svc.models.attribute_names import COMMON_NAMES, AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family
from compiler_svc.models.nested_text import flatten_config
from compiler_svc.models.token_ids import TOKEN_ID_NAMES

#: Group of the entry points by which other distributions register families: `name = "module:FAMILY"`.
ENTRY_POINTS: Final = "kiln.model_families"

#: The families that the files of their folder state, each at the top level.
_OWN: Final = tuple(
    family
    for file in iter_modules(families.__path__, f"{families.__name__}.")
    for family in vars(import_module(file.name)).values()
    if isinstance(family, Family)
)


@cache
def list_families() -> Mapping[str, Family]:
    """Families but for nested ones, by their architectures. An entry point replaces an architecture of ours."""
    return {name: family for name, family in _list_all().items() if family.nested is None}


@cache
def list_nested_families() -> Mapping[str, Family]:
    """Families of text models inside of others, by the architectures of these."""
    return {name: family for name, family in _list_all().items() if family.nested is not None}


@cache
def _list_all() -> Mapping[str, Family]:
    registered = (one.load() for one in entry_points(group=ENTRY_POINTS))
    return {name: family for family in (*_OWN, *registered) for name in family.architectures}


def read_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a `config.json`, those of a text model inside of another at the top level."""
    known = _find_known(config)
    return flatten_config(config, known[0].nested if len(known) == 1 else None)


def flatten_attributes(config: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Brings attributes that replace some of `config`'s to the form of `read_text_config`, which `config` has."""
    known = _find_known(config)
    nested = known[0].nested if len(known) == 1 else None
    return flatten_config(attributes, None if nested is None else replace(nested, defaults={}))


def _find_known(config: Mapping[str, Any]) -> list[Family]:
    """The families of the architectures that a `config.json` names."""
    names, known = config.get("architectures"), _list_all()
    return [known[name] for name in names if isinstance(name, str) and name in known] if isinstance(names, list) else []


@cache
def list_registered() -> Mapping[str, str]:
    """Names and versions of the distributions that register families, by the name of the entry point."""
    found = entry_points(group=ENTRY_POINTS)
    return {one.name: f"{one.dist.name} {one.dist.version}" if one.dist else one.value for one in found}


def list_attributes(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of the attributes of a `config.json` that count for its model; for any, if no family builds it."""
    count = [family.attributes for family in _find_known(config) or _list_all().values()]
    return frozenset({"dtype", "torch_dtype", *TOKEN_ID_NAMES}).union(*count)


def find_attribute_names(config: Mapping[str, Any]) -> AttributeNames:
    """What the family of a `config.json` calls attributes; the common names if no family builds its model."""
    return next((family.names for family in _find_known(config)), COMMON_NAMES)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's `config.json`."""
    reader, known = AttributeReader(config), _list_all()
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.note_invalid("architectures", names, "a list with one architecture")
    elif names[0] not in known:
        reader.note_not_served("architectures", names[0], ", ".join(sorted(known)))
    reader.finish()
    return known[config["architectures"][0]]


def describe_model(config: Mapping[str, Any]) -> ModelDescription:
    """Reads a checkpoint's `config.json` and describes its model."""
    return find_family(config).describe(config)
