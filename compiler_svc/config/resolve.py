"""Resolves a document to the configuration, or lists every mistake in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from bundle.manifest import TargetKind
from compiler_svc.config.attribute import Values
from compiler_svc.config.buckets import resolve_buckets
from compiler_svc.config.domains import Table, show
from compiler_svc.config.findings import Findings, Hint
from compiler_svc.config.interchange import adapt_document
from compiler_svc.config.options import expand_options, locate
from compiler_svc.config.tables import INFERENCE_CONFIG, MOE_NAMES, NEURON_CONFIG, TABLES
from compiler_svc.config.tables.experts import MoENeuronConfig
from compiler_svc.config.tables.general import DTYPES
from compiler_svc.config.tables.inference_config import InferenceConfig
from compiler_svc.config.validator import Validator

#: What is resolved only when all values of a table are known, by class name.
_RESOLVE_LAST: Final[Mapping[str, Callable[[Values], Mapping[str, Any]]]] = {
    "NeuronConfig": resolve_buckets,
    # NxD Inference spells "no limit" -1 as well as 0.
    "OnDeviceSamplingConfig": lambda values: {"top_k": max(values["top_k"], 0)},
}


@dataclass(frozen=True)
class Resolution:
    """A valid configuration, and what its author should know.

    Attributes:
        hints: Values that the target ignores; `warnings` says so, too.
    """

    config: InferenceConfig
    warnings: tuple[str, ...]
    hints: tuple[Hint, ...]


def resolve_config(
    document: Mapping[str, Any], *, checkpoint_dtype: str | None, target: TargetKind = "cpu", compiles: bool = False
) -> Resolution:
    """Validates a document and fills in every default.

    An unset `torch_dtype` takes the checkpoint's dtype, as NxD Inference does, and bfloat16 if the checkpoint names
    none. null is unset.

    Args:
        document: The configuration as JSON's types: `neuron_config`, `fused_spec_config`, `transformers_neuronx`,
            `attribute_map`, and model attributes by name; what NxD Inference saves is such a document.
        checkpoint_dtype: Dtype that the checkpoint's `config.json` names, without `torch.`; None if it names none.
        target: Kind of the target.
        compiles: Whether the configuration is for executables; plans for Neuron targets take more than compiles do.

    Raises:
        ConfigInvalid: There are mistakes; all are listed, together with what is not served.
        FeatureNotServed: There are none, but attributes ask for what this version does not serve.
    """
    findings = Findings()
    expanded, places = expand_options(adapt_document(document, findings), findings)
    context = {
        "target": target,
        "checkpoint_dtype": checkpoint_dtype,
        # Transformers NeuronX quantizes when it loads a checkpoint, so that it has no path of a quantized one.
        "quantizes_at_load": any("quantized" in translation.values for translation in places.values()),
    }
    validator = Validator(target, context, findings, compiles)
    validation = validator.validate("", expanded, INFERENCE_CONFIG, outer={})
    if "torch_dtype" not in validation.values["neuron_config"]["given"]:
        _validate_checkpoint_dtype(checkpoint_dtype, target, findings)
    findings.relocate(lambda path: locate(path, places))
    findings.raise_if_any()
    config = assemble_inference_config(validation.values)
    return Resolution(config, tuple(findings.warnings), tuple(findings.hints))


def assemble_inference_config(values: Values) -> InferenceConfig:
    """Builds a configuration, and the draft model's inside of it.

    Args:
        values: Of InferenceConfig's table, tables inside as mappings, and `model_attributes`.
    """
    config: InferenceConfig = _assemble(INFERENCE_CONFIG.class_name, values)
    return config


def _assemble(class_name: str, values: Values) -> Any:
    """Builds the class of a table, and those of the tables inside, from the values that it has fields for."""
    table = TABLES[class_name]
    resolved = dict(values)
    if class_name in _RESOLVE_LAST:
        resolved |= _RESOLVE_LAST[class_name](values)
    for attribute in table.attributes:
        if isinstance(attribute.domain, Table) and values[attribute.name] is not None:
            resolved[attribute.name] = _assemble(attribute.domain.of, values[attribute.name])
    # A configuration that sets any attribute of experts is one of a mixture of experts.
    has_experts = class_name == "NeuronConfig" and values["given"] & MOE_NAMES
    cls = MoENeuronConfig if has_experts else table.cls
    return cls(**{field.name: resolved[field.name] for field in fields(cls)})


def _validate_checkpoint_dtype(dtype: str | None, target: TargetKind, findings: Findings) -> None:
    attribute = NEURON_CONFIG.find("torch_dtype")
    support = attribute.support_on(target)
    if dtype is not None and not (attribute.domain.accepts(dtype) and support.serves(dtype, dtype)):
        served = support.values or DTYPES.words
        findings.add_unserved("neuron_config.torch_dtype", f"{show(dtype)} from the checkpoint", served)
