"""A row of the validation table: a rule, a configuration that breaks it and one that keeps it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from bundle.manifest import TargetKind
from compiler_svc.config import resolve_config
from compiler_svc.config.rules import RULES, Rule
from compiler_svc.errors import ConfigInvalid

#: Path of each table in a document.
PLACES = {
    "InferenceConfig": "",
    "NeuronConfig": "neuron_config",
    "OnDeviceSamplingConfig": "neuron_config.on_device_sampling_config",
    "LoraServingConfig": "neuron_config.lora_config",
    "RoutedExpertsMLPOpsConfig": "neuron_config.routed_experts_mlp_ops_config",
    "BlockwiseMatmulConfig": "neuron_config.blockwise_matmul_config",
}


@dataclass(frozen=True)
class RuleCase:
    """One rule, with values of its table.

    Attributes:
        attribute: What the violation names, from the table.
        accepted: How the rule begins to say what it accepts, before any value.
        fails: Values that break the rule, and no other but those of `also`.
        passes: Values that break none.
        is_whole: Whether the values are whole documents.
        also: Paths of attributes that other rules name beside.
    """

    attribute: str
    accepted: str
    fails: dict[str, Any]
    passes: dict[str, Any]
    table: str = "NeuronConfig"
    target: TargetKind = "trn2"
    is_whole: bool = False
    also: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.attribute}: {self.accepted}"

    @property
    def rule(self) -> Rule:
        """The only rule that the case can be about."""
        rules, _ = RULES[self.table]
        (rule,) = (
            rule for rule in rules if rule.reads[0] == self.attribute and rule.accepted.startswith(self.accepted)
        )
        return rule

    def check(self) -> None:
        """Asserts that the failing values are refused as the rule says, and the passing ones are not."""
        with pytest.raises(ConfigInvalid) as caught:
            self._resolve(self.fails)
        place = ".".join(filter(None, (PLACES[self.table], self.attribute)))
        assert {violation.field for violation in caught.value.violations} == {place, *self.also}
        pattern = re.sub(r"\\{.*?\\}", ".+", re.escape(self.accepted))
        accepted = [one.accepted for one in caught.value.violations if one.field == place]
        (text,) = (text for text in accepted if re.match(pattern, text))
        assert text.endswith(f" ({self.rule.section})")
        assert "{" not in text
        self._resolve(self.passes)

    def _resolve(self, values: dict[str, Any]) -> None:
        document = values
        if not self.is_whole:
            for name in filter(None, reversed(PLACES[self.table].split("."))):
                document = {name: document}
        resolve_config(document, checkpoint_dtype=None, target=self.target)
