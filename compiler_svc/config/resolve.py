"""A document to the resolved configuration, or to every mistake in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bundle.errors import FieldViolation
from compiler_svc.config.attributes import (
    DTYPES,
    FOREIGN_TO_INFERENCE_CONFIG,
    FOREIGN_TO_NEURON_CONFIG,
    FOREIGN_TO_ON_DEVICE_SAMPLING_CONFIG,
    NEURON_CONFIG,
    ON_DEVICE_SAMPLING_CONFIG,
    Attribute,
)
from compiler_svc.config.buckets import choose_buckets
from compiler_svc.config.domains import Table, show
from compiler_svc.config.neuron_config import InferenceConfig, NeuronConfig, OnDeviceSamplingConfig
from compiler_svc.config.rules import (
    NEURON_CONFIG_NOTES,
    NEURON_CONFIG_RULES,
    ON_DEVICE_SAMPLING_NOTES,
    ON_DEVICE_SAMPLING_RULES,
    Note,
    Rule,
    broken_rules,
    notes_on,
)
from compiler_svc.errors import ConfigInvalid, FeatureNotServed

DEFAULT_DTYPE: Final = "bfloat16"

# Each suggestion costs a search through the table, which an attacker's thousands of names must not multiply.
_MOST_NAMES: Final = 256

_INFERENCE_CONFIG: Final = (Attribute("neuron_config", Table()),)


@dataclass(frozen=True)
class Resolution:
    """A configuration in order, and what its author should know."""

    config: InferenceConfig
    warnings: tuple[str, ...]


def resolve_config(document: Mapping[str, Any], *, checkpoint_dtype: str | None) -> Resolution:
    """Judges a document and fills in every default.

    An unset `torch_dtype` takes the checkpoint's dtype, as NxD Inference does, and bfloat16 where the checkpoint names
    none. null is unset.

    Args:
        document: The configuration as JSON's types.
        checkpoint_dtype: Dtype that the checkpoint's `config.json` names, without `torch.`; None where it names none.

    Raises:
        ConfigInvalid: There are mistakes; all are listed, together with what is not served.
        FeatureNotServed: There are none, but attributes ask for what this version does not serve.
    """
    findings = _Findings()
    outer = findings.judge("", document, _INFERENCE_CONFIG, foreign=FOREIGN_TO_INFERENCE_CONFIG)
    values = findings.judge(
        "neuron_config",
        outer["neuron_config"] or {},
        NEURON_CONFIG,
        foreign=FOREIGN_TO_NEURON_CONFIG,
        rules=NEURON_CONFIG_RULES,
        notes=NEURON_CONFIG_NOTES,
    )
    sampling = values["on_device_sampling_config"]
    if sampling is not None:
        sampling = findings.judge(
            "neuron_config.on_device_sampling_config",
            sampling,
            ON_DEVICE_SAMPLING_CONFIG,
            foreign=FOREIGN_TO_ON_DEVICE_SAMPLING_CONFIG,
            rules=ON_DEVICE_SAMPLING_RULES,
            notes=ON_DEVICE_SAMPLING_NOTES,
        )
    if values["torch_dtype"] is None:
        values["torch_dtype"] = checkpoint_dtype or DEFAULT_DTYPE
        findings.judge_checkpoint_dtype(checkpoint_dtype or DEFAULT_DTYPE)
    findings.raise_if_any()
    return Resolution(InferenceConfig(neuron_config=_neuron_config(values, sampling)), tuple(findings.warnings))


def _neuron_config(values: dict[str, Any], sampling: dict[str, Any] | None) -> NeuronConfig:
    enabled = values["enable_bucketing"]
    resolved = values | {
        "context_encoding_buckets": choose_buckets(
            enabled=enabled, listed=values["context_encoding_buckets"], longest=values["max_context_length"]
        ),
        "token_generation_buckets": choose_buckets(
            enabled=enabled, listed=values["token_generation_buckets"], longest=values["max_length"]
        ),
        "on_device_sampling_config": None if sampling is None else _sampling_config(sampling),
    }
    return NeuronConfig(**resolved)


def _sampling_config(values: dict[str, Any]) -> OnDeviceSamplingConfig:
    # NxD Inference spells "no limit" -1 as well as 0.
    return OnDeviceSamplingConfig(**values | {"top_k": max(values["top_k"], 0)})


@dataclass
class _Findings:
    """What judging a document brings to light."""

    mistakes: list[FieldViolation] = field(default_factory=list)
    unserved: list[FieldViolation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def judge(
        self,
        path: str,
        given: Mapping[str, Any],
        table: tuple[Attribute, ...],
        *,
        foreign: tuple[Attribute, ...],
        rules: tuple[Rule, ...] = (),
        notes: tuple[Note, ...] = (),
    ) -> dict[str, Any]:
        """Judges the attributes of one table and returns their values; a mistaken one has its default."""
        if len(given) > _MOST_NAMES:
            raise ConfigInvalid([FieldViolation(path or "config", f"{len(given)} names", f"at most {_MOST_NAMES}")])
        known = {attribute.name: attribute for attribute in (*table, *foreign)}
        accepted: dict[str, Any] = {}
        mistaken: set[str] = set()
        for name, value in given.items():
            if name not in known:
                self._add_mistake(_join(path, name), value, _suggest(name, known))
            elif value is not None:
                if known[name].domain.accepts(value):
                    accepted[name] = known[name].domain.normalize(value)
                else:
                    mistaken.add(name)
                    self._add_mistake(_join(path, name), value, known[name].domain.accepted)
        values: dict[str, Any] = {}
        for attribute in (*table, *foreign):
            default = attribute.default_from(values)
            values[attribute.name] = accepted.get(attribute.name, default)
            if attribute.name in accepted:
                self._judge_service(_join(path, attribute.name), attribute, values[attribute.name], default)
        for name, wanted in broken_rules(rules, values, mistaken):
            self._add_mistake(_join(path, name), values[name], wanted)
        if not mistaken:
            self.warnings += notes_on(notes, values)
        return {attribute.name: values[attribute.name] for attribute in table}

    def _judge_service(self, path: str, attribute: Attribute, value: object, default: object) -> None:
        if not attribute.serves(value):
            self.unserved.append(_not_served(path, value, attribute))
        elif attribute.hint and value != default:
            self.warnings.append(f"{path}: {show(value)} is ignored: {attribute.hint}")

    def judge_checkpoint_dtype(self, dtype: str) -> None:
        """Judges a `torch_dtype` that the checkpoint chose."""
        attribute = next(one for one in NEURON_CONFIG if one.name == "torch_dtype")
        if not DTYPES.accepts(dtype) or not attribute.serves(dtype):
            violation = _not_served("neuron_config.torch_dtype", dtype, attribute)
            self.unserved.append(
                FieldViolation(violation.field, f"{violation.value} from the checkpoint", violation.accepted)
            )

    def raise_if_any(self) -> None:
        """Raises what was found, mistakes first."""
        if self.mistakes:
            raise ConfigInvalid([*self.mistakes, *self.unserved])
        if self.unserved:
            raise FeatureNotServed(self.unserved)

    def _add_mistake(self, path: str, value: object, accepted: str) -> None:
        self.mistakes.append(FieldViolation(path, show(value), accepted))


def _not_served(path: str, value: object, attribute: Attribute) -> FieldViolation:
    served = " or ".join(map(show, attribute.served))
    return FieldViolation(path, show(value), f"{served}, all that this version serves")


def _join(path: str, name: str) -> str:
    readable = name if name.isidentifier() and name.isascii() and len(name) <= 64 else show(name)
    return f"{path}.{readable}" if path else readable


def _suggest(name: str, known: Mapping[str, Attribute]) -> str:
    similar = difflib.get_close_matches(name, known, n=1)
    if similar:
        return f"did you mean {similar[0]!r}?"
    return "a name that the configuration has; " + _suggest_place(name)


def _suggest_place(name: str) -> str:
    """Names a table that does have the attribute: options often stand one level too high or too low."""
    tables = {
        "neuron_config": (*NEURON_CONFIG, *FOREIGN_TO_NEURON_CONFIG),
        "neuron_config.on_device_sampling_config": ON_DEVICE_SAMPLING_CONFIG,
    }
    for path, table in tables.items():
        if any(attribute.name == name for attribute in table):
            return f"did you mean {path}.{name}?"
    return "the model's own attributes come from the checkpoint's config.json"
