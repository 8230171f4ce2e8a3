"""InferenceConfig and NeuronConfig as a whole."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import LATER, Attribute, ConfigTable, refused
from compiler_svc.config.domains import Anything, Table, TextMap
from compiler_svc.config.tables.attention import ATTENTION_ATTRIBUTES
from compiler_svc.config.tables.batching import BATCHING_ATTRIBUTES
from compiler_svc.config.tables.documents import INFERENCE_CONFIG as SECTION
from compiler_svc.config.tables.documents import LORA, SAMPLING
from compiler_svc.config.tables.experts import MOE_ATTRIBUTES
from compiler_svc.config.tables.general import GENERAL_ATTRIBUTES
from compiler_svc.config.tables.quantization import QUANTIZATION_ATTRIBUTES
from compiler_svc.config.tables.speculation import SPECULATION_ATTRIBUTES
from compiler_svc.config.tables.undocumented import UNDOCUMENTED_ATTRIBUTES, only_default

_NO_HOOKS: Final = refused("it is a Python hook; the checkpoint's config.json is always read")

#: Attributes of NeuronConfig, and of MoENeuronConfig after them, in an order that lets defaults be derived.
NEURON_CONFIG: Final = ConfigTable(
    "NeuronConfig",
    (
        *GENERAL_ATTRIBUTES,
        *BATCHING_ATTRIBUTES,
        *ATTENTION_ATTRIBUTES,
        Attribute(name="on_device_sampling_config", domain=Table("OnDeviceSamplingConfig"), section=SAMPLING),
        *QUANTIZATION_ATTRIBUTES,
        *SPECULATION_ATTRIBUTES,
        Attribute(name="lora_config", domain=Table("LoraServingConfig"), section=LORA, cpu=LATER),
        *MOE_ATTRIBUTES,
    ),
    UNDOCUMENTED_ATTRIBUTES,
)

INFERENCE_CONFIG: Final = ConfigTable(
    "InferenceConfig",
    (
        Attribute(name="neuron_config", domain=Table("NeuronConfig"), default={}, section=SECTION),
        Attribute(name="fused_spec_config", domain=Table("FusedSpecNeuronConfig"), section=SECTION, cpu=LATER),
        Attribute(name="attribute_map", domain=TextMap(), default={}, section=SECTION),
    ),
    (
        Attribute(name="load_config", domain=Anything(), section=SECTION, cpu=_NO_HOOKS, neuron=_NO_HOOKS),
        *only_default(metadata=None, num_cores_per_group=1),
    ),
)
