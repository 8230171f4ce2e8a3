"""Models that take more than text, whose text model is one of a family: `config.json` has its attributes in an object
of their own, and the checkpoint its tensors below a prefix. What takes images is left out, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.family import Family, NestedText

#: The object of `config.json` that has the text model's attributes.
TEXT_CONFIG: Final = "text_config"
_PREFIX: Final = "language_model."
#: What stands around the text model. transformers 4.52 and later put `model.` before their own names.
_PARTS_FOR_IMAGES: Final = ("vision_tower", "multi_modal_projector")
_LEFT_OUT: Final = (*_PARTS_FOR_IMAGES, *(f"model.{name}" for name in _PARTS_FOR_IMAGES))


def nest_family(family: Family, architecture: str, *, model_type: str, reference: str, nested: NestedText) -> Family:
    """The family of models that have one of `family` inside; all but `nested` are the outer model's."""

    def describe(config: Mapping[str, Any]) -> ModelDescription:
        with AttributeReader(config) as model:
            if TEXT_CONFIG in config:
                model.note_invalid(TEXT_CONFIG, config[TEXT_CONFIG], "an object")
            kind = config.get("model_type")
            if kind not in (None, nested.model_type):
                model.note_not_served(f"{TEXT_CONFIG}.model_type", kind, nested.model_type)
        return _put_inside(family.describe(config))

    return replace(
        family,
        architectures=(architecture,),
        model_type=model_type,
        attributes=family.attributes | {TEXT_CONFIG, "model_type"},
        describe=describe,
        reference=reference,
        nested=nested,
    )


def _put_inside(description: ModelDescription) -> ModelDescription:
    """The description with the names that the checkpoint of the model around it has."""
    storage = replace(
        description.storage,
        prefix=_PREFIX,
        optional_prefix="",
        other_names={**description.storage.other_names, "lm_head": f"{_PREFIX}lm_head"},
        other_prefixes={f"model.{_PREFIX}": f"{_PREFIX}model."},
    )
    return replace(description, storage=storage, left_out=_LEFT_OUT)


def flatten_config(config: Mapping[str, Any], nested: NestedText | None) -> dict[str, Any]:
    """The attributes of the text model at the top level, as its family reads them; others stay as they are.

    A model that has no text model inside (`nested` is None), or no object for it, stays as it is.
    """
    text = config.get(TEXT_CONFIG)
    if nested is None or not isinstance(text, Mapping):
        return dict(config)
    around = {name: value for name, value in config.items() if name not in (TEXT_CONFIG, "model_type")}
    flat = {**around, **text}
    flat |= {name: value for name, value in nested.defaults.items() if flat.get(name) is None}
    # transformers ties by what the outer object says, whatever the inner one does.
    outer = {name: around[name] for name in ("architectures", "tie_word_embeddings") if around.get(name) is not None}
    return flat | outer


def nest_config(around: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flatten_config`, for transformers: puts the text model's attributes into `around`, the file's."""
    if not isinstance(around.get(TEXT_CONFIG), Mapping):
        return dict(config)
    said = {name: config[name] for name in around.keys() & config.keys() - {"model_type"}}
    return {**around, **said, TEXT_CONFIG: {name: value for name, value in config.items() if name != "architectures"}}
