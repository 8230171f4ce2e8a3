"""The model families that this compiler builds: those of `families`, and those that other distributions register."""

from __future__ import annotations

import re
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

#: Ends of the names of models that make text, and of the base models inside of them.
_ENDS: Final = re.compile(r"(ForCausalLM|LMHead|(PreTrained|LMHead|DoubleHeads)?Model)$", re.IGNORECASE)

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
def list_gguf_families() -> Mapping[str, Family]:
    """Families that GGUF files have, by the names of their architectures there."""
    return {family.gguf.name: family for family in list_families().values() if family.gguf is not None}


@cache
def _list_all() -> Mapping[str, Family]:
    registered = (one.load() for one in entry_points(group=ENTRY_POINTS))
    return {name: family for family in (*_OWN, *registered) for name in family.architectures}


def read_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a `config.json`, those of a text model inside of another at the top level; the architecture as
    its family names it.
    """
    config = _name_architecture(config)
    known = _find_known(config)
    return flatten_config(config, known[0].nested if len(known) == 1 else None)


def flatten_attributes(config: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Brings attributes that replace some of `config`'s to the form of `read_text_config`, which `config` has."""
    known = _find_known(config)
    nested = known[0].nested if len(known) == 1 else None
    if "architectures" in attributes:
        named = _name_architecture({"model_type": config.get("model_type"), **attributes})
        attributes = {**attributes, "architectures": named["architectures"]}
    return flatten_config(attributes, None if nested is None else replace(nested, defaults={}))


def _name_architecture(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes, with the family's own architecture in place of none, of the base model's, or of another spelling.

    `model_type` says which family that is, as it does for transformers' AutoModelForCausalLM.
    """
    family, names = _find_by_type(config), config.get("architectures")
    if family is None or (names and not _is_alias(names, family)):
        return config
    return {**config, "architectures": [family.architectures[0]]}


def _find_by_type(config: Mapping[str, Any]) -> Family | None:
    """The family of a `config.json`'s `model_type`."""
    kind = config.get("model_type")
    return next((one for one in _list_all().values() if one.model_type and one.model_type == kind), None)


def _is_alias(names: object, family: Family) -> bool:
    """Whether `architectures` has one that no family has for its own, and that is a model of this one by its name."""
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] in _list_all():
        return False
    own = {_find_stem(name) for name in family.architectures} | {family.model_type.replace("_", "")}
    return _find_stem(names[0]) in own


def _find_stem(architecture: str) -> str:
    return _ENDS.sub("", architecture).lower()


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
    config = _name_architecture(config)
    reader, known = AttributeReader(config), _list_all()
    names, by_type = config.get("architectures"), _find_by_type(config)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.note_invalid("architectures", names, "a list with one architecture")
    elif by_type is not None and (other := _find_other(names, by_type)) is not None:
        accepted = f"{by_type.architectures[0]}, as model_type {by_type.model_type!r} says"
        reader.note_invalid("architectures", names[0], f"{accepted}; or model_type {other.model_type!r}")
    elif names[0] not in known:
        reader.note_not_served("architectures", names[0], ", ".join(sorted(known)))
    reader.finish()
    return known[config["architectures"][0]]


def _find_other(names: list[str], by_type: Family) -> Family | None:
    """The family that `architectures` names if it is another one than that of the type."""
    known = _list_all()
    named = known.get(names[0]) or next((one for one in known.values() if _is_alias(names, one)), None)
    # The type of a text model inside of another is for its description to compare.
    if named is None or named.nested is not None or named.model_type in ("", by_type.model_type):
        return None
    return named


def describe_model(config: Mapping[str, Any]) -> ModelDescription:
    """Reads a checkpoint's `config.json` and describes its model."""
    return find_family(config).describe(_name_architecture(config))
