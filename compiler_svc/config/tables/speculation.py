"""NeuronConfig: speculation and Medusa; FusedSpecNeuronConfig."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import LATER, Attribute, ConfigTable, Values, hint, same_as
from compiler_svc.config.domains import ClassPath, Flag, Integer, Paths, Table, Text
from compiler_svc.config.tables.documents import (
    FEATURE_FUSED_SPECULATION,
    FEATURE_SPECULATION,
    FUSED_SPECULATION,
    MEDUSA,
    SPECULATION,
    UNDOCUMENTED,
)

_CLASS_FROM_CHECKPOINT: Final = hint("the checkpoint's config.json says which model class it is")


def _without_speculation(values: Values) -> bool:
    return not (values["speculation_length"] or values["is_medusa"] or values["enable_fused_speculation"])


SPECULATION_ATTRIBUTES: Final = (
    Attribute(name="speculation_length", domain=Integer(0), default=0, section=SPECULATION, cpu=LATER),
    Attribute(
        name="spec_batch_size",
        domain=Integer(1),
        default=same_as("batch_size"),
        derivation="batch_size",
        section=SPECULATION,
        cpu=LATER,
    ),
    Attribute(name="enable_eagle_speculation", domain=Flag(), default=False, section=SPECULATION, cpu=LATER),
    Attribute(name="enable_eagle_draft_input_norm", domain=Flag(), default=False, section=SPECULATION, cpu=LATER),
    # An EAGLE draft is configured like its target, and speculates no further.
    Attribute(name="is_eagle_draft", domain=Flag(), default=False, section=FEATURE_FUSED_SPECULATION, cpu=LATER),
    Attribute(
        name="enable_fused_speculation",
        domain=Flag(),
        default=lambda values: values["enable_eagle_speculation"] and not values["is_eagle_draft"],
        derivation="enable_eagle_speculation, except in the configuration of an EAGLE draft",
        section=SPECULATION,
        cpu=LATER,
    ),
    Attribute(name="is_medusa", domain=Flag(), default=False, section=MEDUSA, cpu=LATER),
    Attribute(name="medusa_speculation_length", domain=Integer(0), default=0, section=MEDUSA, cpu=LATER),
    Attribute(name="num_medusa_heads", domain=Integer(0), default=0, section=MEDUSA, cpu=LATER),
    Attribute(name="medusa_tree", domain=Paths(), default=(), section=MEDUSA, cpu=LATER),
    Attribute(
        name="trace_tokengen_model",
        domain=Flag(),
        default=_without_speculation,
        derivation="true without speculation",
        section=FEATURE_SPECULATION,
        deprecated="because the speculation options say which submodels are compiled",
    ),
)

FUSED_SPEC_NEURON_CONFIG: Final = ConfigTable(
    "FusedSpecNeuronConfig",
    (
        Attribute(
            name="worker_cls",
            domain=ClassPath(),
            section=FUSED_SPECULATION,
            cpu=_CLASS_FROM_CHECKPOINT,
            neuron=_CLASS_FROM_CHECKPOINT,
        ),
        Attribute(name="draft_config", domain=Table("InferenceConfig"), section=FUSED_SPECULATION, cpu=LATER),
        Attribute(name="draft_model_path", domain=Text(), section=FUSED_SPECULATION, cpu=LATER),
        Attribute(
            name="draft_model_cls",
            domain=ClassPath(),
            section=UNDOCUMENTED,
            cpu=_CLASS_FROM_CHECKPOINT,
            neuron=_CLASS_FROM_CHECKPOINT,
        ),
    ),
)
