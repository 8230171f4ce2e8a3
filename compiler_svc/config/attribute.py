"""What a table says about one attribute: name, domain, default, where it is documented, and what becomes of its value.

Each target honours an attribute; or ignores it and says so; or has it only at its default until later work; or reckons
with it in plans only; or refuses it. Nothing is ignored in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from compiler_svc.config.domains import Domain, Table

#: Kinds of targets.
TargetKind = Literal["cpu", "inf2", "trn1", "trn2", "trn3"]
TARGET_KINDS: Final[tuple[TargetKind, ...]] = ("cpu", "inf2", "trn1", "trn2", "trn3")

#: Resolved values of one table, by attribute name; also `target`, the target's kind, and `outer`, the values of the
#: table around it.
Values = Mapping[str, Any]
#: Computes a default from the attributes that stand before in the table.
Derivation = Callable[[Values], Any]


@dataclass(frozen=True)
class Support:
    """What a target makes of an attribute.

    Attributes:
        level: `honoured`: the value counts. `hint`: it is ignored, and the compile says so. `later`: accepted at its
            default only, until later work serves it. `planned`: plans reckon with it, and nothing is compiled for the
            target yet. `refused`: never valid at other than the default.
        reason: Why a value is ignored or refused.
        values: Values that are served where `honoured` is not for all of the domain; others are for later.
        acts_as: The value that a target behaves as whatever it is told, where that is not the default.
    """

    level: Literal["honoured", "hint", "later", "planned", "refused"]
    reason: str = ""
    values: tuple[Any, ...] = ()
    acts_as: Any = None

    def serves(self, value: object, default: object) -> bool:
        """Whether the target takes `value`; `False` and `0` are different values."""
        if self.level == "later":
            return is_same(value, default)
        return not self.values or any(is_same(value, one) for one in self.values)


HONOURED: Final = Support("honoured")
LATER: Final = Support("later")
PLANNED: Final = Support("planned")


def hint(reason: str, *, acts_as: object = None) -> Support:
    """A value that counts for nothing, and why."""
    return Support("hint", reason, acts_as=acts_as)


def refused(reason: str) -> Support:
    """A value that can never count, and why."""
    return Support("refused", reason)


@dataclass(frozen=True)
class Alias:
    """Another name of an attribute.

    Attributes:
        note: What the caller should know, empty for a mere spelling.
        negated: Whether the other name says the opposite.
    """

    name: str
    note: str = ""
    negated: bool = False


@dataclass(frozen=True, kw_only=True)
class Attribute:
    """One row of a table.

    Attributes:
        default: Value, or its derivation. None stays unset.
        derivation: The derivation in words, empty for a plain value.
        section: Where the documents describe it, empty where they do not.
        cpu: What the cpu target makes of it.
        neuron: What Neuron targets make of it, unless `exceptions` has the target.
        aliases: Its other names.
        deprecated: Why it is not to be used any more; its value is then judged and dropped.
    """

    name: str
    domain: Domain
    default: Any = None
    derivation: str = ""
    section: str
    cpu: Support = HONOURED
    neuron: Support = PLANNED
    exceptions: Mapping[TargetKind, Support] = field(default_factory=dict)
    aliases: tuple[Alias, ...] = ()
    deprecated: str = ""

    def default_from(self, values: Values) -> Any:
        """The default, given the values of the rows before."""
        return self.default(values) if callable(self.default) else self.default

    def cite(self, accepted: str) -> str:
        """What is accepted, with the section that describes the attribute."""
        return f"{accepted} ({self.section})" if self.section else accepted

    def support_on(self, target: TargetKind) -> Support:
        """What a target makes of the attribute."""
        return self.exceptions.get(target, self.cpu if target == "cpu" else self.neuron)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its other names."""
        return (self.name, *(alias.name for alias in self.aliases))


@dataclass(frozen=True)
class ConfigTable:
    """One configuration class of the documents.

    Attributes:
        class_name: The documents' name.
        attributes: In an order that lets defaults be derived.
        unrecorded: Judged and dropped: attributes that only NxD Inference's code has, and those of Python alone.
    """

    class_name: str
    attributes: tuple[Attribute, ...]
    unrecorded: tuple[Attribute, ...] = ()

    @functools.cached_property
    def rows(self) -> tuple[Attribute, ...]:
        """All attributes."""
        return (*self.attributes, *self.unrecorded)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Attribute]:
        """Attributes by each of their names."""
        return {name: attribute for attribute in self.rows for name in attribute.names}

    def find(self, name: str) -> Attribute:
        """The attribute of a name that the table has."""
        return self.by_name[name]


def is_same(value: object, other: object) -> bool:
    """Whether two values are equal and of one type."""
    return type(value) is type(other) and value == other


def same_as(name: str) -> Derivation:
    """Derives a default that is another attribute's value."""
    return lambda values: values[name]


def is_table(attribute: Attribute) -> bool:
    """Whether the attribute's value is a configuration of its own."""
    return isinstance(attribute.domain, Table)
