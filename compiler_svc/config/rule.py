"""Rules: demands that attributes make of each other. Notes: remarks on valid values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bundle.manifest import TargetKind
from compiler_svc.config.attribute import Values

#: Sources of demands that no document states: NxD Inference's code, and what Kiln makes of an attribute.
NXDI_CODE: Final = "NxD Inference, source code"
KILN: Final = "Kiln, configuration reference"


@dataclass(frozen=True)
class Rule:
    """One demand, with examples. The first attribute read is the one that a violation names.

    Attributes:
        reads: Attributes that the rule reads. One of another table has the path to it before its name, from here:
            `fused_spec_config.draft_model_path`.
        accepted: What would be accepted, with attribute names in braces for their values.
        section: The document, and its section, that asks for it.
        breaks: Values of the table that break it; a whole document if it has `neuron_config`. Examples of rules for
            all targets are for trn2.
        keeps: Values that break no rule, as few others as possible.
        target: The only target that it holds for; None: for all.
    """

    reads: tuple[str, ...]
    holds: Callable[[Values], bool]
    accepted: str
    section: str
    breaks: Mapping[str, Any] = field(default_factory=dict)
    keeps: Mapping[str, Any] = field(default_factory=dict)
    target: TargetKind | None = None

    def describe(self, values: Values) -> str:
        """Says what would be accepted beside these values, and which document says so."""
        return f"{self.accepted.format(**values)} ({self.section})"


def at_most(name: str, limit: str, *others: str, section: str, because: str = "") -> Rule:
    """A number is at most another one; `others` are attributes that either follows from. An unset one is no limit."""
    return Rule(
        (name, limit, *others),
        lambda v: None in (v[name], v[limit]) or v[name] <= v[limit],
        f"at most {limit}, which is {{{limit}}}" + (f": {because}" if because else ""),
        section,
        breaks={limit: 4, name: 5},
        keeps={limit: 4, name: 4},
    )


def needs(name: str, other: str, *, section: str, **beside: object) -> Rule:
    """A flag needs another one; `beside` is what the examples need."""
    return Rule(
        (name, other),
        lambda v: not v[name] or v[other],
        f"false, unless {other} is true",
        section,
        breaks={**beside, name: True, other: False},
        keeps={**beside, name: True, other: True},
    )


@dataclass(frozen=True)
class Note:
    """One remark on values that are valid but may not do what their author expects.

    On `target` it applies to the values `doubtful` of the table, and does not apply to the values `plain`.
    """

    applies: Callable[[Values], bool]
    text: str
    doubtful: Mapping[str, Any]
    plain: Mapping[str, Any] = field(default_factory=dict)
    target: TargetKind = "trn2"


def broken_rules(rules: tuple[Rule, ...], values: Values, mistaken: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields (attribute, what would be accepted) for every broken rule that reads no mistaken attribute.

    All values are in their domains; a mistaken attribute has its default. `mistaken` has paths as rules have them; a
    mistake inside of a table is one of the table, too.
    """
    for rule in rules:
        # Few rules are broken: what they read is looked at only then.
        if rule.target not in (None, values.get("target")) or rule.holds(values):
            continue
        if not any(_overlap(read, one) for read in rule.reads for one in mistaken):
            yield rule.reads[0], rule.describe(values)


def find_value(values: Values, path: str) -> Any:
    """The value of an attribute that a rule reads; None if its table is unset."""
    found: Any = values
    for name in path.split("."):
        found = None if found is None else found[name]
    return found


def notes_on(notes: tuple[Note, ...], values: Values) -> Iterator[str]:
    """Yields the remarks on values that keep every rule."""
    for note in notes:
        if note.applies(values):
            yield note.text.format(**values)


def _overlap(read: str, mistake: str) -> bool:
    return read == mistake or read.startswith(f"{mistake}.") or mistake.startswith(f"{read}.")
