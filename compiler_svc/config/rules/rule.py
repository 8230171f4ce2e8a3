"""Rules: demands that attributes make of each other. Notes: remarks on valid values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.config.attribute import Values

#: Sources of demands that no document states: NxD Inference's code, and what Kiln makes of an attribute.
NXDI_CODE: Final = "NxD Inference, source code"
KILN: Final = "Kiln, configuration reference"


@dataclass(frozen=True)
class Rule:
    """One demand. The first attribute read is the one that a violation names.

    Attributes:
        reads: Attributes that the rule reads. One of another table has the path to it before its name, from here:
            `fused_spec_config.draft_model_path`.
        holds: Whether the values keep the rule.
        accepted: What would be accepted, with attribute names in braces for their values.
        section: The document, and its section, that asks for it.
    """

    reads: tuple[str, ...]
    holds: Callable[[Values], bool]
    accepted: str
    section: str

    def describe(self, values: Values) -> str:
        """Says what would be accepted beside these values, and which document says so."""
        return f"{self.accepted.format(**values)} ({self.section})"


@dataclass(frozen=True)
class Note:
    """One remark on values that are valid but may not do what their author expects."""

    applies: Callable[[Values], bool]
    text: str


def broken_rules(rules: tuple[Rule, ...], values: Values, mistaken: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields (attribute, what would be accepted) for every broken rule that reads no mistaken attribute.

    Args:
        values: All in their domains; a mistaken attribute has its default.
        mistaken: Attributes whose values are mistakes already, with paths as rules have them. A mistake inside of a
            table is one of the table, too.
    """
    for rule in rules:
        # Few rules are broken: what they read is looked at only then.
        if not rule.holds(values) and not any(_overlap(read, one) for read in rule.reads for one in mistaken):
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
