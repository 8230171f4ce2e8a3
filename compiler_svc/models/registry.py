"""The model families that this compiler builds: those of `families`, and those that other distributions register."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.families.bloom.config import FAMILY as BLOOM
from compiler_svc.models.families.cohere.config import FAMILY as COHERE
from compiler_svc.models.families.gemma2.config import FAMILY as GEMMA2
from compiler_svc.models.families.gemma3.config import FAMILY as GEMMA3
from compiler_svc.models.families.gpt2.config import FAMILY as GPT2
from compiler_svc.models.families.gpt_neox.config import FAMILY as GPT_NEOX
from compiler_svc.models.families.gptj.config import FAMILY as GPTJ
from compiler_svc.models.families.granite.config import FAMILY as GRANITE
from compiler_svc.models.families.llama.config import FAMILY as LLAMA
from compiler_svc.models.families.mistral.config import FAMILY as MISTRAL
from compiler_svc.models.families.olmo2.config import FAMILY as OLMO2
from compiler_svc.models.families.opt.config import FAMILY as OPT
from compiler_svc.models.families.phi3.config import FAMILY as PHI3
from compiler_svc.models.families.qwen2.config import FAMILY as QWEN2
from compiler_svc.models.families.qwen3.config import FAMILY as QWEN3
from compiler_svc.models.families.smollm3.config import FAMILY as SMOLLM3
from compiler_svc.models.families.starcoder2.config import FAMILY as STARCODER2
from compiler_svc.models.family import Family
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


@cache
def list_families() -> Mapping[str, Family]:
    """Families by the architectures that they build. An entry point replaces an architecture of ours."""
    registered = (one.load() for one in entry_points(group=ENTRY_POINTS))
    return {name: family for family in (*_OWN, *registered) for name in family.architectures}


@cache
def list_registered() -> Mapping[str, str]:
    """Names and versions of the distributions that register families, by the name of the entry point."""
    found = entry_points(group=ENTRY_POINTS)
    return {one.name: f"{one.dist.name} {one.dist.version}" if one.dist else one.value for one in found}


def list_attributes(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of the attributes of a `config.json` that count for its model; for any, if no family builds it."""
    names = config.get("architectures")
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    families = list_families()
    count = [families[name].attributes for name in known if name in families]
    count = count or [family.attributes for family in families.values()]
    return frozenset({"dtype", "torch_dtype", *TOKEN_ID_NAMES}).union(*count)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's `config.json`.

    Raises:
        ModelConfigInvalid: It names no architecture, or several.
        ModelNotServed: No family builds its architecture.
    """
    reader, families = AttributeReader(config), list_families()
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
