"""Rules on speculation with a draft model; `draft` has those between target and draft."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.rules.rule import KILN, NXDI_CODE, Note, Rule
from compiler_svc.config.tables.documents import FEATURE_FUSED_SPECULATION, FEATURE_SPECULATION, SPECULATION


def speculates_unfused(values: Values) -> bool:
    """Whether a draft model outside of the executable proposes tokens.

    The configuration of a draft model may be a copy of its target's, and does not speculate itself.
    """
    is_draft = values["is_eagle_draft"] or bool(values["outer"]["outer"])
    fused = values["enable_fused_speculation"] or values["is_medusa"]
    return values["speculation_length"] > 0 and not fused and not is_draft


_UNFUSED: Final = ("speculation_length", "enable_fused_speculation", "is_medusa", "is_eagle_draft")

SPECULATION_RULES: Final = (
    Rule(
        ("speculation_length", "enable_fused_speculation"),
        lambda v: not v["enable_fused_speculation"] or v["speculation_length"] > 0,
        "an integer from 1, because enable_fused_speculation is true",
        SPECULATION,
    ),
    Rule(
        ("speculation_length", "seq_len"),
        lambda v: v["speculation_length"] < v["seq_len"],
        "less than seq_len, which is {seq_len}: what is proposed has to fit behind a prompt",
        KILN,
    ),
    Rule(
        ("enable_fused_speculation", "enable_eagle_speculation", "is_eagle_draft"),
        lambda v: not v["enable_eagle_speculation"] or v["enable_fused_speculation"] or v["is_eagle_draft"],
        "true, because enable_eagle_speculation is true",
        SPECULATION,
    ),
    Rule(
        ("on_device_sampling_config", "enable_fused_speculation"),
        lambda v: not v["enable_fused_speculation"] or v["on_device_sampling_config"] is not None,
        "an object, which may be empty, because enable_fused_speculation is true: executables accept tokens themselves",
        FEATURE_FUSED_SPECULATION,
    ),
    Rule(
        ("max_batch_size", "batch_size", *_UNFUSED),
        lambda v: not speculates_unfused(v) or v["max_batch_size"] == 1,
        "1, because speculation_length is {speculation_length} and enable_fused_speculation is false",
        FEATURE_SPECULATION,
    ),
    Rule(
        ("spec_batch_size", "batch_size", *_UNFUSED),
        lambda v: not speculates_unfused(v) or v["spec_batch_size"] == 1,
        "1, because speculation_length is {speculation_length} and enable_fused_speculation is false",
        FEATURE_SPECULATION,
    ),
    Rule(
        ("is_eagle_draft", "enable_fused_speculation"),
        lambda v: not (v["is_eagle_draft"] and v["enable_fused_speculation"]),
        "false, because enable_fused_speculation is true: a draft model has no draft model of its own",
        FEATURE_FUSED_SPECULATION,
    ),
    Rule(
        ("is_prefix_caching", *_UNFUSED),
        lambda v: not (v["is_prefix_caching"] and speculates_unfused(v)),
        "false, because speculation_length is {speculation_length} and enable_fused_speculation is false: the "
        "speculation submodel has no buckets for prefixes",
        NXDI_CODE,
    ),
)

SPECULATION_NOTES: Final = (
    Note(
        lambda v: v["enable_eagle_draft_input_norm"] and not (v["enable_eagle_speculation"] or v["is_eagle_draft"]),
        "neuron_config.enable_eagle_draft_input_norm: it is ignored because enable_eagle_speculation is false",
    ),
)
