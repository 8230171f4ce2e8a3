"""What an attribute is: name, domain, default, the document that describes it, and what each target makes of it.

A class states each attribute once, as a field: `batch_size: int = attribute(GENERAL, integer(1), default=1)`.
`read_attributes` reads the rows of a table off the fields; validation, assembly and the reference loop over the rows.

Targets differ in what they make of an attribute; see `Support`. None ignores anything in silence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Final, Literal, ParamSpec, TypeVar, get_type_hints

from bundle.manifest import TargetKind
from compiler_svc.config.domains import Domain, find_domain
from targets.cpu import CPU
from targets.registry import TARGETS

TARGET_KINDS: Final[tuple[TargetKind, ...]] = tuple(TARGETS)

#: Resolved values of one table, by attribute name; also `target`, the target's kind, and `outer`, the values of the
#: table around it.
Values = Mapping[str, Any]

#: Stands for the domain that the type of the field says.
OF_ITS_TYPE: Final = Domain("what the type says", lambda _: False)

#: Key of an attribute in the metadata of a field, and its name on a property's function.
_ROW: Final = "_config_attribute"

_Parameters = ParamSpec("_Parameters")
_Method = TypeVar("_Method", bound=Callable[[Any], Any])


@dataclass(frozen=True)
class Support:
    """What a target makes of an attribute.

    Attributes:
        level: `honoured`: the value counts. `hint`: it is ignored, and the compile says so. `later`: accepted at its
            default only, until later work serves it. `planned`: plans reckon with it; for compiles see
            `Attribute.compiled`. `refused`: never valid at other than the default.
        values: The values that are served, if `honoured` is for a part of the domain only; others are for later.
        acts_as: The value that the target acts on whatever the document says, if that is not the default.
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
    """Support of a target that ignores the attribute, for a reason that callers are told."""
    return Support("hint", reason, acts_as=acts_as)


def refused(reason: str) -> Support:
    """Support of a target on which other values than the default are mistakes, for a reason that callers are told."""
    return Support("refused", reason)


@dataclass(frozen=True)
class Alias:
    """Another name of an attribute. `note` warns callers who use it; a negated one says the opposite."""

    name: str
    note: str = ""
    negated: bool = False


@dataclass(frozen=True)
class Derivation:
    """A default that follows from attributes before this one in the table; `words` say how, for the reference."""

    derive: Callable[[Values], Any]
    words: str


@dataclass(frozen=True)
class Attribute:
    """One row of a table.

    Attributes:
        section: The section of the documents that describes the attribute, empty if none does.
        domain: The values that it takes; the field's type says which unless they are stated.
        default: A value or a `Derivation`. An attribute with default None stays unset.
        cpu: What the cpu target makes of it.
        neuron: What plans for Neuron targets make of it, unless `exceptions` has the target.
        compiled: What compiles for Neuron targets make of it; None: what cpu makes of it, because they have its graphs,
            and the default only if cpu ignores it.
        deprecated: Why callers should not set it any more; its value is then validated and dropped.
        note: For the reference: where the documents or NxD Inference's code say otherwise, and why. The newest
            document wins, first the API guide, then the feature guide; mistakes of the code are not copied.
    """

    section: str
    domain: Domain = OF_ITS_TYPE
    _: KW_ONLY
    name: str = ""
    default: Any = None
    cpu: Support = HONOURED
    neuron: Support = PLANNED
    compiled: Support | None = None
    exceptions: Mapping[TargetKind, Support] = field(default_factory=dict)
    aliases: tuple[Alias, ...] = ()
    deprecated: str = ""
    note: str = ""

    def default_from(self, values: Values) -> Any:
        """The default, given the values of the rows before."""
        return self.default.derive(values) if isinstance(self.default, Derivation) else self.default

    @property
    def derivation(self) -> str:
        """How the default is derived, in words; empty for a plain value."""
        return self.default.words if isinstance(self.default, Derivation) else ""

    def cite(self, accepted: str) -> str:
        """What is accepted, with the section that describes the attribute."""
        return f"{accepted} ({self.section})" if self.section else accepted

    def support_on(self, target: TargetKind, *, compiles: bool = False) -> Support:
        """What compiles, or otherwise plans, for a target make of the attribute."""
        support = self.exceptions.get(target, self.cpu if target == CPU.kind else self.neuron)
        if not compiles or target == CPU.kind or support.level == "refused":
            return support
        return self.compiled or (LATER if self.cpu.level == "hint" else self.cpu)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its other names."""
        return (self.name, *(alias.name for alias in self.aliases))


def _as_field(make: Callable[_Parameters, Attribute]) -> Callable[_Parameters, Any]:
    def declare(*args: _Parameters.args, **columns: _Parameters.kwargs) -> Any:
        return field(metadata={_ROW: make(*args, **columns)})

    return declare


#: Declares a field of a configuration class as an attribute; takes what `Attribute` takes.
attribute = _as_field(Attribute)


def deprecated_attribute(
    section: str, domain: Domain, *, because: str, derivation: str
) -> Callable[[_Method], _Method]:
    """Declares a property of a configuration class as an attribute that callers should not set any more.

    `because` continues "deprecated, because" in the warning that callers get; `derivation` says how the value follows.
    """

    def mark(method: _Method) -> _Method:
        default = Derivation(lambda values: method(SimpleNamespace(**values)), derivation)
        setattr(method, _ROW, Attribute(section, domain, default=default, deprecated=f"because {because}"))
        return method

    return mark


def read_attributes(cls: type[Any]) -> tuple[Attribute, ...]:
    """The rows of a configuration class, base classes first; deprecated properties follow the fields of their class."""
    hints = get_type_hints(cls)
    metadata = {one.name: one.metadata for one in fields(cls)}
    rows: list[Attribute] = []
    for part in reversed(cls.__mro__):
        stated = [(name, metadata[name].get(_ROW)) for name in inspect.get_annotations(part)]
        properties = [(name, member.fget) for name, member in vars(part).items() if isinstance(member, property)]
        stated += [(name, getattr(method, _ROW, None)) for name, method in properties]
        rows += [_complete(row, name, hints.get(name)) for name, row in stated if row is not None]
    return tuple(rows)


def _complete(row: Attribute, name: str, hint: Any) -> Attribute:
    return replace(row, name=name, domain=find_domain(hint) if row.domain is OF_ITS_TYPE else row.domain)


@dataclass(frozen=True)
class ConfigTable:
    """One configuration class of the documents. Its attributes have an order that lets defaults be derived.

    Values of unrecorded attributes, Python hooks and what only NxD Inference's code has, are validated and dropped.
    """

    cls: type[Any]
    attributes: tuple[Attribute, ...]
    unrecorded: tuple[Attribute, ...] = ()

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return self.cls.__name__

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
    return Derivation(lambda values: values[name], name)
