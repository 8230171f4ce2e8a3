"""Architectures that this compiler builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.llama_config import LLAMA_ATTRIBUTES, LlamaConfig, parse_llama_config
from compiler_svc.models.token_ids import TOKEN_ID_NAMES

#: Reads the configuration of a model, by Hugging Face architecture.
ARCHITECTURES: Final[Mapping[str, Callable[[Mapping[str, Any], str], LlamaConfig]]] = {
    "LlamaForCausalLM": parse_llama_config,
}

#: Attributes that count, by Hugging Face architecture, beside tokens and dtype.
_ATTRIBUTES: Final[Mapping[str, frozenset[str]]] = {"LlamaForCausalLM": LLAMA_ATTRIBUTES}


def list_attributes(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of the attributes of a `config.json` that count for its model; for any, where it is none that is built."""
    names = config.get("architectures")
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    count = [_ATTRIBUTES[name] for name in known if name in _ATTRIBUTES] or _ATTRIBUTES.values()
    return frozenset({"dtype", "torch_dtype", *TOKEN_ID_NAMES}).union(*count)


def parse_model_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Reads a checkpoint's `config.json`.

    Raises:
        ModelConfigInvalid: It names no architecture, or attributes are missing or impossible.
        ModelNotServed: An architecture or attribute that this compiler does not build.
    """
    reader = AttributeReader(config)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.note_invalid("architectures", names, "a list with one architecture")
    elif names[0] not in ARCHITECTURES:
        reader.note_not_served("architectures", names[0], ", ".join(sorted(ARCHITECTURES)))
    reader.finish()
    architecture = str(config["architectures"][0])
    return ARCHITECTURES[architecture](config, architecture)
