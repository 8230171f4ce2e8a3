"""The model families that this compiler builds: those of `families`, and those that other distributions register."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from compiler_svc.models.attribute_names import COMMON_NAMES, AttributeNames
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.families.bloom.config import FAMILY as BLOOM
from compiler_svc.models.families.cohere.config import FAMILY as COHERE
from compiler_svc.models.families.gemma2.config import FAMILY as GEMMA2
from compiler_svc.models.families.gemma3.config import FAMILY as GEMMA3
from compiler_svc.models.families.gemma3.config import WITH_IMAGES as GEMMA3_WITH_IMAGES
from compiler_svc.models.families.gpt2.config import FAMILY as GPT2
from compiler_svc.models.families.gpt_neox.config import FAMILY as GPT_NEOX
from compiler_svc.models.families.gptj.config import FAMILY as GPTJ
from compiler_svc.models.families.granite.config import FAMILY as GRANITE
from compiler_svc.models.families.llama.config import FAMILY as LLAMA
from compiler_svc.models.families.mistral.config import FAMILY as MISTRAL
from compiler_svc.models.families.mistral.config import WITH_IMAGES as MISTRAL_WITH_IMAGES
from compiler_svc.models.families.olmo2.config import FAMILY as OLMO2
from compiler_svc.models.families.opt.config import FAMILY as OPT
from compiler_svc.models.families.phi3.config import FAMILY as PHI3
from compiler_svc.models.families.qwen2.config import FAMILY as QWEN2
from compiler_svc.models.families.qwen3.config import FAMILY as QWEN3
from compiler_svc.models.families.smollm3.config import FAMILY as SMOLLM3
from compiler_svc.models.families.starcoder2.config import FAMILY as STARCODER2
from compiler_svc.models.family import Family
from compiler_svc.models.nested_text import flatten_config
from compiler_svc.models.token_ids import TOKEN_ID_NAMES

#: Group of the entry points by which other distributions register families: `name = "module:FAMILY"`.
ENTRY_POINTS: Final = "kiln.model_families"

_OWN: Final = (
    BLOOM,
    COHERE,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPTJ,
    GPT_NEOX,
    GRANITE,
    LLAMA,
    MISTRAL,
    OLMO2,
    OPT,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)
_OWN_NESTED: Final = (GEMMA3_WITH_IMAGES, MISTRAL_WITH_IMAGES)


@cache
def list_families() -> Mapping[str, Family]:
    """Families by the architectures that they build. An entry point replaces an architecture of ours.

    Those whose models are inside of others are `list_nested_families`.
    """
    return {name: family for name, family in _list_all().items() if family.nested is None}


@cache
def list_nested_families() -> Mapping[str, Family]:
    """Families of text models inside of others, by the architectures of these."""
    return {name: family for name, family in _list_all().items() if family.nested is not None}


@cache
def _list_all() -> Mapping[str, Family]:
    registered = (one.load() for one in entry_points(group=ENTRY_POINTS))
    return {name: family for family in (*_OWN, *_OWN_NESTED, *registered) for name in family.architectures}


def read_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a `config.json`, those of a text model inside of another at the top level."""
    known = _find_known(config)
    return flatten_config(config, known[0].nested if len(known) == 1 else None)


def flatten_attributes(config: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Brings attributes that replace some of a model's to the form of `read_text_config`.

    Args:
        config: The model's, in that form.
    """
    known = _find_known(config)
    nested = known[0].nested if len(known) == 1 else None
    return flatten_config(attributes, None if nested is None else replace(nested, defaults={}))


def _find_known(config: Mapping[str, Any]) -> list[Family]:
    """The families of the architectures that a `config.json` names."""
    names, families = config.get("architectures"), _list_all()
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [families[name] for name in known if name in families]


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
    """The family of a checkpoint's `config.json`.

    Raises:
        ModelConfigInvalid: It names no architecture, or several.
        ModelNotServed: No family builds its architecture.
    """
    reader, families = AttributeReader(config), _list_all()
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.note_invalid("architectures", names, "a list with one architecture")
    elif names[0] not in families:
        reader.note_not_served("architectures", names[0], ", ".join(sorted(families)))
    reader.finish()
    return families[config["architectures"][0]]


def describe_model(config: Mapping[str, Any]) -> ModelDescription:
    """Reads a checkpoint's `config.json` and describes its model.

    Raises:
        ModelConfigInvalid: It names no architecture, or attributes are missing or impossible.
        ModelNotServed: An architecture or attribute that this compiler does not build.
    """
    family = find_family(config)
    return family.describe(family.parse_config(config, config["architectures"][0]))
