"""Architectures that this compiler builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.llama_config import LlamaConfig, parse_llama_config

#: Reads the configuration of a model, by Hugging Face architecture.
ARCHITECTURES: Final[Mapping[str, Callable[[Mapping[str, Any], str], LlamaConfig]]] = {
    "LlamaForCausalLM": parse_llama_config,
}


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
