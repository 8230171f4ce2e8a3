"""Resolves a document to the configuration, or lists every mistake in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

from bundle.manifest import TargetKind
from compiler_svc.config.attribute import Values
from compiler_svc.config.buckets import resolve_buckets
from compiler_svc.config.domains import show
from compiler_svc.config.findings import Findings, Hint
from compiler_svc.config.interchange import adapt_document
from compiler_svc.config.rule import find_value
from compiler_svc.config.tables import INFERENCE_CONFIG, MOE_NAMES, NEURON_CONFIG, TABLES
from compiler_svc.config.tables.experts import MoENeuronConfig
from compiler_svc.config.tables.general import DEFAULT_DTYPE, DTYPES
from compiler_svc.config.tables.inference_config import DRAFT_CONFIG, InferenceConfig
from compiler_svc.config.transformers_neuronx import Places, expand_options, locate
from compiler_svc.config.validator import Validator

#: What is resolved only when all values of a table are known, by class name.
_RESOLVE_LAST: Final[Mapping[str, Callable[[Values], Mapping[str, Any]]]] = {
    "NeuronConfig": resolve_buckets,
    # NxD Inference spells "no limit" -1 as well as 0.
    "OnDeviceSamplingConfig": lambda values: {"top_k": max(values["top_k"], 0)},
}

_PATH: Final = "quantized_checkpoints_path"
#: The dtype of computation, as rules on a NeuronConfig and rules on an InferenceConfig name it.
_DTYPES: Final = frozenset({"torch_dtype", "neuron_config.torch_dtype"})


@dataclass(frozen=True)
class Resolution:
    """A valid configuration, and remarks for its author. Hints, values that the target ignores, are warnings, too."""

    config: InferenceConfig
    warnings: tuple[str, ...]
    hints: tuple[Hint, ...]


@dataclass(frozen=True)
class ReadConfig:
    """A document that is validated but for what follows from its checkpoint's dtype. It is resolved once."""

    values: dict[str, Any]
    validator: Validator
    places: Places

    @property
    def model_attributes(self) -> Mapping[str, Any]:
        """Attributes of the model that the document gives, by name."""
        attributes: Mapping[str, Any] = self.values["model_attributes"]
        return attributes

    @property
    def quantized_path(self) -> str | None:
        """The directory of quantized weights that the target is to take; None if it takes the model's own."""
        values, validator = self.values["neuron_config"], self.validator
        support = NEURON_CONFIG.find(_PATH).support_on(validator.target, compiles=validator.compiles)
        path: str | None = values[_PATH] if values["quantized"] and support.level == "honoured" else None
        return path

    @property
    def attribute_map(self) -> Mapping[str, str]:
        """Other names of the model's attributes, alias to name."""
        names: Mapping[str, str] = self.values["attribute_map"]
        return names

    def resolve(
        self, checkpoint_dtype: str | None, quantization: Mapping[str, Any] = MappingProxyType({})
    ) -> Resolution:
        """Fills in what follows from the checkpoint; see `resolve_config`."""
        values = self.values["neuron_config"]
        if self.quantized_path is not None:
            values.update((name, value) for name, value in quantization.items() if name not in values["given"])
        elif "quantized" not in values["given"]:
            own = values["given"] & {"activation_quantization_type"}
            values.update((name, value) for name, value in quantization.items() if name not in own)
        if "torch_dtype" not in values["given"]:
            if self.validator.waits_for:
                self._take_dtype(checkpoint_dtype or DEFAULT_DTYPE)
            _validate_checkpoint_dtype(checkpoint_dtype, self.validator.target, self.validator.findings)
        self.raise_if_mistaken()
        findings = self.validator.findings
        return Resolution(assemble_inference_config(self.values), tuple(findings.warnings), tuple(findings.hints))

    def raise_if_mistaken(self) -> None:
        """Raises what has been found until now."""
        self.validator.findings.relocate(lambda path: locate(path, self.places))
        self.validator.findings.raise_if_any()

    def _take_dtype(self, dtype: str) -> None:
        """Fills in the dtype, also of a draft model, which computes as its target does; checks what waited for it."""
        for path in ("neuron_config", f"{DRAFT_CONFIG}.neuron_config"):
            if (neuron_config := find_value(self.values, path)) is not None:
                if "torch_dtype" not in neuron_config["given"]:
                    neuron_config["torch_dtype"] = dtype
                self.validator.validate_rules(path, NEURON_CONFIG, neuron_config)
        self.validator.validate_rules("", INFERENCE_CONFIG, self.values)


def resolve_config(
    document: Mapping[str, Any],
    *,
    checkpoint_dtype: str | None,
    quantization: Mapping[str, Any] = MappingProxyType({}),
    target: TargetKind = "cpu",
    compiles: bool = False,
) -> Resolution:
    """Validates a document and fills in every default.

    An unset `torch_dtype` takes the checkpoint's dtype, as NxD Inference does, and bfloat16 if the checkpoint names
    none. null is unset.

    Args:
        document: The configuration as JSON's types: `neuron_config`, `fused_spec_config`, `transformers_neuronx`,
            `attribute_map`, and model attributes by name; what NxD Inference saves is such a document.
        checkpoint_dtype: Dtype that the checkpoint's `config.json` names, without `torch.`; None if it names none.
        quantization: What a quantized checkpoint makes of attributes of `neuron_config` unless it says `quantized`.
        compiles: Whether the configuration is for executables; plans for Neuron targets take more than compiles do.

    Raises:
        ConfigInvalid: There are mistakes; all are listed, together with what is not served.
        FeatureNotServed: There are none, but attributes ask for what this version does not serve.
    """
    context = {"target": target, "checkpoint_dtype": checkpoint_dtype}
    return _read(document, context, compiles=compiles).resolve(checkpoint_dtype, quantization)


def read_config(document: Mapping[str, Any], *, target: TargetKind, compiles: bool) -> ReadConfig:
    """Does what `resolve_config` does before the checkpoint is known, and raises as it does.

    Rules on the dtype wait for it, unless the document states one.
    """
    read = _read(document, {"target": target}, compiles=compiles)
    read.raise_if_mistaken()
    return read


def _read(document: Mapping[str, Any], context: Mapping[str, Any], *, compiles: bool) -> ReadConfig:
    findings = Findings()
    expanded, places = expand_options(adapt_document(document, findings), findings)
    given = expanded.get("neuron_config")
    has_dtype = "checkpoint_dtype" in context or (isinstance(given, Mapping) and given.get("torch_dtype") is not None)
    validator = Validator(
        context["target"],
        {"checkpoint_dtype": None, **context},
        findings,
        compiles,
        waits_for=frozenset() if has_dtype else _DTYPES,
    )
    return ReadConfig(validator.validate("", expanded, INFERENCE_CONFIG, outer={}).values, validator, places)


def assemble_inference_config(values: Values) -> InferenceConfig:
    """Builds a configuration of the values of its table, those of tables inside as mappings."""
    config: InferenceConfig = _assemble(INFERENCE_CONFIG.class_name, values)
    return config


def _assemble(class_name: str, values: Values) -> Any:
    """Builds the class of a table, and those of the tables inside, from the values that it has fields for."""
    table = TABLES[class_name]
    resolved = dict(values)
    if class_name in _RESOLVE_LAST:
        resolved |= _RESOLVE_LAST[class_name](values)
    for attribute in table.attributes:
        if attribute.domain.table and values[attribute.name] is not None:
            resolved[attribute.name] = _assemble(attribute.domain.table, values[attribute.name])
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
