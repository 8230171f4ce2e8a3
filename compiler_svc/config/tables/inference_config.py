"""InferenceConfig: compile-time options beside the model's own attributes, and the draft model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from compiler_svc.config.attribute import LATER, attribute, hint
from compiler_svc.config.domains import ClassPath
from compiler_svc.config.tables.documents import FUSED_SPECULATION, INFERENCE_CONFIG, UNDOCUMENTED
from compiler_svc.config.tables.experts import MoENeuronConfig
from compiler_svc.config.tables.neuron_config import NeuronConfig

_CLASS_FROM_CHECKPOINT: Final = hint("the checkpoint's config.json says which model class it is")


@dataclass(frozen=True, kw_only=True)
class FusedSpecNeuronConfig:
    """The draft model that is compiled together with the target. Classes are for NxD Inference only."""

    worker_cls: str | None = attribute(
        FUSED_SPECULATION, ClassPath(), cpu=_CLASS_FROM_CHECKPOINT, neuron=_CLASS_FROM_CHECKPOINT
    )
    draft_config: InferenceConfig | None = attribute(FUSED_SPECULATION, cpu=LATER)
    draft_model_path: str | None = attribute(FUSED_SPECULATION, cpu=LATER)
    draft_model_cls: str | None = attribute(
        UNDOCUMENTED, ClassPath(), cpu=_CLASS_FROM_CHECKPOINT, neuron=_CLASS_FROM_CHECKPOINT
    )


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """What to compile.

    Attributes:
        fused_spec_config: The draft model of fused speculation.
        model_attributes: Attributes of the model that replace those of the checkpoint's `config.json`.
        attribute_map: Other names of the model's attributes, alias to name.
    """

    neuron_config: NeuronConfig = attribute(INFERENCE_CONFIG, default={})
    fused_spec_config: FusedSpecNeuronConfig | None = attribute(INFERENCE_CONFIG, cpu=LATER)
    model_attributes: dict[str, Any]
    attribute_map: dict[str, str] = attribute(INFERENCE_CONFIG, default={})

    def to_json(self) -> dict[str, Any]:
        """The configuration as a document, for the manifest and for cache keys: what resolves to it again.

        The model's attributes stand at the top level. What is unset at the top level is left out.
        """
        document = {**self.model_attributes, "neuron_config": _plain(self.neuron_config)}
        if self.fused_spec_config is not None:
            draft = self.fused_spec_config.draft_config
            document["fused_spec_config"] = _plain(self.fused_spec_config) | {
                "draft_config": None if draft is None else draft.to_json()
            }
        if self.attribute_map:
            document["attribute_map"] = self.attribute_map
        return document

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> InferenceConfig:
        """Reads what msgspec wrote of a configuration, which says by its names alone whose NeuronConfig it holds.

        Raises:
            msgspec.ValidationError: It is no such configuration.
        """
        config = msgspec.convert(fields, cls)
        if "moe_tp_degree" in fields["neuron_config"]:
            config = replace(config, neuron_config=msgspec.convert(fields["neuron_config"], MoENeuronConfig))
        if config.fused_spec_config is not None and config.fused_spec_config.draft_config is not None:
            draft_config = cls.from_fields(fields["fused_spec_config"]["draft_config"])
            config = replace(config, fused_spec_config=replace(config.fused_spec_config, draft_config=draft_config))
        return config


def _plain(value: object) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return fields
