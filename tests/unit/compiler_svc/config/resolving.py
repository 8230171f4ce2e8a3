"""Short ways to resolve a configuration in tests."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from bundle.errors import FieldViolation
from compiler_svc.config import Resolution, TargetKind, resolve_config
from compiler_svc.config.rule import Rule
from compiler_svc.errors import ConfigInvalid, FeatureNotServed


def resolve(checkpoint_dtype: str | None = None, target: TargetKind = "cpu", **neuron_config: Any) -> Resolution:
    """Resolves a NeuronConfig."""
    return resolve_config({"neuron_config": neuron_config}, checkpoint_dtype=checkpoint_dtype, target=target)


def nest(path: str, value: Any) -> dict[str, Any]:
    """A document with one value at a path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def mistakes_in(target: TargetKind = "cpu", **neuron_config: Any) -> dict[str, FieldViolation]:
    """The violations of a NeuronConfig with mistakes, by path below `neuron_config`."""
    found = mistakes_in_document({"neuron_config": neuron_config}, target)
    return {path.removeprefix("neuron_config."): violation for path, violation in found.items()}


def mistakes_in_document(document: dict[str, Any], target: TargetKind = "cpu") -> dict[str, FieldViolation]:
    """The violations of a document with mistakes, by path."""
    with pytest.raises(ConfigInvalid) as caught:
        resolve_config(document, checkpoint_dtype=None, target=target)
    assert caught.value.reason == "CONFIG_INVALID"
    paths = [violation.field for violation in caught.value.violations]
    assert len(paths) == len(set(paths)), paths
    return dict(zip(paths, caught.value.violations, strict=True))


def unserved_in(target: TargetKind = "cpu", **neuron_config: Any) -> dict[str, FieldViolation]:
    """What is not served of a NeuronConfig without mistakes, by path below `neuron_config`."""
    with pytest.raises(FeatureNotServed) as caught:
        resolve(None, target, **neuron_config)
    assert caught.value.reason == "FEATURE_NOT_SERVED"
    return {violation.field.removeprefix("neuron_config."): violation for violation in caught.value.violations}


def find_rule_text(rule: Rule, told: Iterable[str]) -> str:
    """What a violation says of a rule, values filled in, and which document says so; empty if none does."""
    pattern = re.sub(r"\\\{.*?\\\}", ".+", re.escape(rule.accepted)) + re.escape(f" ({rule.section})")
    return next((text for text in told if re.fullmatch(pattern, text) and "{" not in text), "")
