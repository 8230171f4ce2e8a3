"""Rules between a target model and the draft model that is compiled together with it."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.rules.rule import KILN, NXDI_CODE, Rule, find_value
from compiler_svc.config.tables.documents import FEATURE_FUSED_SPECULATION, FUSED_SPECULATION, SPECULATION

_DRAFT_CONFIG: Final = "fused_spec_config.draft_config"
_DRAFT: Final = f"{_DRAFT_CONFIG}.neuron_config"


def _equal(name: str, reason: str) -> Rule:
    return Rule(
        (f"{_DRAFT}.{name}", f"neuron_config.{name}"),
        lambda v: find_value(v, _DRAFT) is None or find_value(v, _DRAFT)[name] == v["neuron_config"][name],
        f"{{neuron_config[{name}]}}, as for the target: {reason}",
        KILN,
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
    ),
    Rule(
        ("neuron_config.enable_fused_speculation", "fused_spec_config"),
        lambda v: v["fused_spec_config"] is None or v["neuron_config"]["enable_fused_speculation"],
        "true, because fused_spec_config is set",
        FEATURE_FUSED_SPECULATION,
    ),
    Rule(
        (_DRAFT_CONFIG, "fused_spec_config"),
        lambda v: v["fused_spec_config"] is None or v["fused_spec_config"]["draft_config"] is not None,
        "the draft model's configuration",
        FUSED_SPECULATION,
    ),
    Rule(
        ("fused_spec_config.draft_model_path",),
        lambda v: v["fused_spec_config"] is None or v["fused_spec_config"]["draft_model_path"] is not None,
        "the path of the draft model's checkpoint",
        FUSED_SPECULATION,
    ),
    Rule(
        (f"{_DRAFT}.torch_dtype", "neuron_config.torch_dtype", "neuron_config.cast_type"),
        _has_equal_dtypes,
        "'{neuron_config[torch_dtype]}', as for the target, unless the target's cast_type is 'as-declared'",
        NXDI_CODE,
    ),
    _equal("tp_degree", "the same ranks hold both models"),
    _equal("max_length", "both KV caches hold the same sequences"),
    _equal("max_batch_size", "both KV caches have the same rows"),
    Rule(
        (f"{_DRAFT}.enable_fused_speculation", "fused_spec_config"),
        lambda v: not find_value(v, f"{_DRAFT}.enable_fused_speculation"),
        "false: a draft model has no draft model of its own",
        FEATURE_FUSED_SPECULATION,
    ),
    Rule(
        (f"{_DRAFT}.is_eagle_draft", "neuron_config.enable_eagle_speculation"),
        lambda v: (
            find_value(v, _DRAFT) is None
            or find_value(v, _DRAFT)["is_eagle_draft"] == v["neuron_config"]["enable_eagle_speculation"]
        ),
        "enable_eagle_speculation of the target, which is {neuron_config[enable_eagle_speculation]}",
        SPECULATION,
    ),
)
