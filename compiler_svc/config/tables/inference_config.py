"""InferenceConfig: compile-time options beside the model's own attributes, and the draft model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from compiler_svc.config.attribute import LATER, Values, attribute, hint
from compiler_svc.config.domains import CLASS
from compiler_svc.config.rule import KILN, NXDI_CODE, Rule, find_value
from compiler_svc.config.tables.documents import (
    FEATURE_FUSED_SPECULATION,
    FUSED_SPECULATION,
    INFERENCE_CONFIG,
    SPECULATION,
    UNDOCUMENTED,
)
from compiler_svc.config.tables.experts import MoENeuronConfig
from compiler_svc.config.tables.neuron_config import NeuronConfig
from compiler_svc.config.tables.speculation import FUSED, fuse

_CLASS_FROM_CHECKPOINT: Final = hint("the checkpoint's config.json says which model class it is")


@dataclass(frozen=True, kw_only=True)
class FusedSpecNeuronConfig:
    """The draft model that is compiled together with the target. Classes are for NxD Inference only."""

    worker_cls: str | None = attribute(
        FUSED_SPECULATION, CLASS, cpu=_CLASS_FROM_CHECKPOINT, neuron=_CLASS_FROM_CHECKPOINT
    )
    draft_config: InferenceConfig | None = attribute(FUSED_SPECULATION, cpu=LATER)
    draft_model_path: str | None = attribute(FUSED_SPECULATION, cpu=LATER)
    draft_model_cls: str | None = attribute(
        UNDOCUMENTED, CLASS, cpu=_CLASS_FROM_CHECKPOINT, neuron=_CLASS_FROM_CHECKPOINT
    )


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """What to compile. `fused_spec_config` has the draft model of fused speculation.

    `model_attributes` replace those of the checkpoint's `config.json`; `attribute_map` maps aliases of them to names.
    """

    neuron_config: NeuronConfig = attribute(INFERENCE_CONFIG, default={})
    fused_spec_config: FusedSpecNeuronConfig | None = attribute(INFERENCE_CONFIG, cpu=LATER)
    model_attributes: dict[str, Any]
    attribute_map: dict[str, str] = attribute(INFERENCE_CONFIG, default={})

    def to_json(self) -> dict[str, Any]:
        """The configuration as a document, for the manifest and for cache keys: what resolves to it again.

        The model's attributes stand at the top level. What is unset at the top level is left out, and so are unset
        attributes that are newer than bundles, whose digests stay.
        """
        neuron_config = _plain(self.neuron_config)
        for name in _LEFT_OUT_UNSET:
            if neuron_config[name] is None:
                del neuron_config[name]
        document = {**self.model_attributes, "neuron_config": neuron_config}
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
        """Reads what msgspec wrote of a configuration, which says by its names alone whose NeuronConfig it holds."""
        config = msgspec.convert(fields, cls)
        if "moe_tp_degree" in fields["neuron_config"]:
            config = replace(config, neuron_config=msgspec.convert(fields["neuron_config"], MoENeuronConfig))
        if config.fused_spec_config is not None and config.fused_spec_config.draft_config is not None:
            draft_config = cls.from_fields(fields["fused_spec_config"]["draft_config"])
            config = replace(config, fused_spec_config=replace(config.fused_spec_config, draft_config=draft_config))
        return config


#: Attributes that earlier bundles do not have.
_LEFT_OUT_UNSET: Final = (
    *("activation_quantization_type", "kv_quant_config", "logit_processors"),
    *("output_prompt_logprobs", "output_embeddings"),
)


def _plain(value: object) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return fields


DRAFT_CONFIG: Final = "fused_spec_config.draft_config"
_DRAFT: Final = f"{DRAFT_CONFIG}.neuron_config"


def _equal(name: str, reason: str, *, breaks: Mapping[str, Any], keeps: Mapping[str, Any]) -> Rule:
    return Rule(
        (f"{_DRAFT}.{name}", f"neuron_config.{name}"),
        lambda v: find_value(v, _DRAFT) is None or find_value(v, _DRAFT)[name] == v["neuron_config"][name],
        f"{{neuron_config[{name}]}}, as for the target: {reason}",
        KILN,
        breaks=breaks,
        keeps=keeps,
    )


def _has_equal_dtypes(values: Values) -> bool:
    target, draft = values["neuron_config"], find_value(values, _DRAFT)
    return draft is None or draft["torch_dtype"] == target["torch_dtype"] or target["cast_type"] == "as-declared"


def _asks_for_draft(values: Values) -> bool:
    """Whether this is a target that is fused with a draft model; another rule refuses a draft that asks for one."""
    return values["neuron_config"]["enable_fused_speculation"] and not values["outer"]


#: Rules on an InferenceConfig.
INFERENCE_CONFIG_RULES: Final = (
    Rule(
        ("fused_spec_config", "neuron_config.enable_fused_speculation"),
        lambda v: not _asks_for_draft(v) or v["fused_spec_config"] is not None,
        "an object with draft_config and draft_model_path, because enable_fused_speculation is true",
        FEATURE_FUSED_SPECULATION,
        breaks={"neuron_config": FUSED},
        keeps=fuse(),
    ),
    Rule(
        ("neuron_config.enable_fused_speculation", "fused_spec_config"),
        lambda v: v["fused_spec_config"] is None or v["neuron_config"]["enable_fused_speculation"],
        "true, because fused_spec_config is set",
        FEATURE_FUSED_SPECULATION,
        breaks=fuse(enable_fused_speculation=False),
        keeps=fuse(),
    ),
    Rule(
        (DRAFT_CONFIG, "fused_spec_config"),
        lambda v: v["fused_spec_config"] is None or v["fused_spec_config"]["draft_config"] is not None,
        "the draft model's configuration",
        FUSED_SPECULATION,
        breaks={"neuron_config": FUSED, "fused_spec_config": {"draft_model_path": "draft"}},
        keeps=fuse(),
    ),
    Rule(
        ("fused_spec_config.draft_model_path",),
        lambda v: v["fused_spec_config"] is None or v["fused_spec_config"]["draft_model_path"] is not None,
        "the path of the draft model's checkpoint",
        FUSED_SPECULATION,
        breaks={"neuron_config": FUSED, "fused_spec_config": {"draft_config": {}}},
        keeps=fuse(),
    ),
    Rule(
        (f"{_DRAFT}.torch_dtype", "neuron_config.torch_dtype", "neuron_config.cast_type"),
        _has_equal_dtypes,
        "'{neuron_config[torch_dtype]}', as for the target, unless the target's cast_type is 'as-declared'",
        NXDI_CODE,
        breaks=fuse({"torch_dtype": "float32"}, torch_dtype="bfloat16"),
        keeps=fuse({"torch_dtype": "float32"}, torch_dtype="bfloat16", cast_type="as-declared"),
    ),
    _equal(
        "tp_degree",
        "the same ranks hold both models",
        breaks=fuse({"tp_degree": 2}, tp_degree=4),
        keeps=fuse({"tp_degree": 4}, tp_degree=4),
    ),
    _equal(
        "max_length",
        "both KV caches hold the same sequences",
        breaks=fuse({"seq_len": 64}),
        keeps=fuse({"seq_len": 64}, seq_len=64),
    ),
    _equal(
        "max_batch_size",
        "both KV caches have the same rows",
        breaks=fuse({"batch_size": 2}, batch_size=4),
        keeps=fuse({"batch_size": 4}, batch_size=4),
    ),
    Rule(
        (f"{_DRAFT}.enable_fused_speculation", "fused_spec_config"),
        lambda v: not find_value(v, f"{_DRAFT}.enable_fused_speculation"),
        "false: a draft model has no draft model of its own",
        FEATURE_FUSED_SPECULATION,
        breaks=fuse(FUSED | {"enable_fused_speculation": True}),
        keeps=fuse(FUSED | {"enable_fused_speculation": False}),
    ),
    Rule(
        (f"{_DRAFT}.is_eagle_draft", "neuron_config.enable_eagle_speculation"),
        lambda v: (
            find_value(v, _DRAFT) is None
            or find_value(v, _DRAFT)["is_eagle_draft"] == v["neuron_config"]["enable_eagle_speculation"]
        ),
        "enable_eagle_speculation of the target, which is {neuron_config[enable_eagle_speculation]}",
        SPECULATION,
        breaks=fuse(enable_eagle_speculation=True),
        keeps=fuse({"is_eagle_draft": True}, enable_eagle_speculation=True),
    ),
)
