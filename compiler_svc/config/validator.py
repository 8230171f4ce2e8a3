"""Validates a document against the tables: names, domains, what the target makes of each value, and the rules."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bundle.errors import FieldViolation
from bundle.manifest import TargetKind
from compiler_svc.config.attribute import Attribute, ConfigTable, Support, Values, is_same
from compiler_svc.config.domains import JSON, show
from compiler_svc.config.findings import Findings, Hint
from compiler_svc.config.rule import broken_rules, find_value, notes_on
from compiler_svc.config.tables import INFERENCE_CONFIG, RULES, TABLES, list_model_attributes
from compiler_svc.errors import ConfigInvalid

#: Names that one table of a document may give.
_MAX_NAMES: Final = 256
#: Names that get a suggestion: each costs a search through the tables, and a document may hold thousands of names. An
#: error lists fewer mistakes than this.
_MAX_SUGGESTIONS: Final = 32
#: Characters of a name that is searched for: longer ones are no misspellings, and the search takes long.
_MAX_NAME_CHARS: Final = 64
#: Names of other libraries for attributes that are spelled quite differently here.
_FOREIGN_NAMES: Final = {
    "sequence_length": "seq_len",
    "max_sequence_length": "seq_len",
    "max_model_len": "seq_len",
    "max_num_seqs": "max_batch_size",
    "tensor_parallel_size": "tp_degree",
    "num_gpu_blocks_override": "pa_num_blocks",
}
#: What is accepted, if no name resembles the given one.
_ANY_NAME: Final = "a name that the configuration has"


@dataclass(frozen=True)
class Validation:
    """The values of every attribute of one table, by name, those of tables inside as mappings.

    `given` among them has the names that were set. Mistaken attributes are those whose values are mistakes in
    themselves; those of tables inside have a path.
    """

    values: dict[str, Any]
    mistaken: frozenset[str]


@dataclass(frozen=True)
class Validator:
    """Validates tables for one target, and collects what it finds.

    `context` is what defaults and rules depend on beside other attributes: `target` and `checkpoint_dtype`.
    `waits_for` are attributes whose defaults are not known yet, with paths as rules have them. Rules that read them are
    left out until `validate_rules` is called.
    """

    target: TargetKind
    context: Mapping[str, Any]
    findings: Findings
    compiles: bool = False
    waits_for: frozenset[str] = frozenset()

    def validate(
        self,
        path: str,
        document: Mapping[str, Any],
        table: ConfigTable,
        *,
        outer: Values,
        mistaken_outside: Collection[str] = (),
        serves: bool = True,
    ) -> Validation:
        """Validates the attributes of one table and of those inside; a mistaken one takes its default.

        Of the table around it, `outer` has the values that are known so far, and `mistaken_outside` the attributes that
        are mistakes. `serves` says whether to validate what the target makes of the values, too.
        """
        if len(document) > _MAX_NAMES:
            raise ConfigInvalid([FieldViolation(path or "config", f"{len(document)} names", f"at most {_MAX_NAMES}")])
        accepted, mistaken = self._read(path, document, table)
        if table is INFERENCE_CONFIG:
            self._refuse_second_draft(path, accepted, outer)
        values: dict[str, Any] = {**self.context, "outer": outer, "given": frozenset(accepted)}
        for attribute in table.rows:
            default = attribute.default_from(values)
            value = accepted.get(attribute.name, default)
            is_served = serves
            if attribute.domain.table:
                # A table that is unset by default is a feature that setting it asks for.
                is_served = serves and default is None
                is_later = is_served and self._support(attribute).level == "later"
                inside = self._validate_inside(path, attribute, value, values, mistaken, serves=serves and not is_later)
                mistaken |= {f"{attribute.name}.{name}" for name in inside.mistaken}
                value = inside.values or None
            values[attribute.name] = value
            if attribute.name in accepted:
                place = join_path(path, attribute.name)
                if self._refuses(place, attribute, value, default):
                    mistaken.add(attribute.name)
                elif is_served:
                    self._validate_support(place, attribute, value, default)
        if table is INFERENCE_CONFIG:
            values["model_attributes"] = {
                name: value for name, value in document.items() if name in list_model_attributes()
            }
        mistakes = mistaken | {f"outer.{name}" for name in mistaken_outside}
        self.validate_rules(path, table, values, mistakes | self.waits_for)
        if not mistakes:
            self._note_surprises(path, table, values)
        self._note_undocumented(path, table, accepted)
        return Validation(values, frozenset(mistaken))

    def validate_rules(
        self, path: str, table: ConfigTable, values: Values, mistaken: Collection[str] = frozenset()
    ) -> None:
        """Validates the rules that read no mistaken attribute."""
        rules, _ = RULES.get(table.class_name, ((), ()))
        # NxD Inference has an attribute `target`, too, which is not what rules mean.
        values = {**values, **self.context}
        for name, wanted in broken_rules(rules, values, mistaken):
            place = f"{path}.{name}" if path else name
            self.findings.add_mistake(place, find_value(values, name), wanted)

    def _note_surprises(self, path: str, table: ConfigTable, values: Values) -> None:
        _, notes = RULES.get(table.class_name, ((), ()))
        # Notes name attributes from `neuron_config` on, which a draft model has, too.
        model = path.partition("neuron_config")[0]
        self.findings.warnings += [f"{model}{note}" for note in notes_on(notes, {**values, **self.context})]

    def _validate_inside(
        self,
        path: str,
        attribute: Attribute,
        document: Mapping[str, Any] | None,
        outer: Values,
        mistaken: Collection[str],
        *,
        serves: bool,
    ) -> Validation:
        """Validates the table that is an attribute's value; an unset one has no values."""
        if document is None:
            return Validation({}, frozenset())
        place, table = join_path(path, attribute.name), TABLES[attribute.domain.table]
        return self.validate(place, document, table, outer=outer, mistaken_outside=mistaken, serves=serves)

    def _refuse_second_draft(self, path: str, accepted: dict[str, Any], outer: Values) -> None:
        if outer and (value := accepted.pop("fused_spec_config", None)) is not None:
            place = join_path(path, "fused_spec_config")
            self.findings.add_mistake(place, value, "unset: a draft model has no draft model of its own")

    def _read(self, path: str, document: Mapping[str, Any], table: ConfigTable) -> tuple[dict[str, Any], set[str]]:
        """Reads the values in their domains, by attribute, and finds the attributes with a mistake. null is unset."""
        accepted: dict[str, Any] = {}
        spellings: dict[str, str] = {}
        mistaken: set[str] = set()
        for name, value in document.items():
            attribute = table.by_name.get(name)
            if table is INFERENCE_CONFIG and name in list_model_attributes():
                if not JSON.accepts(value):
                    self.findings.add_mistake(join_path(path, name), value, JSON.accepted)
            elif attribute is None:
                is_listed = len(self.findings.mistakes) < _MAX_SUGGESTIONS
                suggestion = _suggest_name(name, table) if is_listed else _ANY_NAME
                self.findings.add_mistake(join_path(path, name), value, suggestion)
            elif value is None:
                continue
            elif not attribute.domain.accepts(value):
                mistaken.add(attribute.name)
                self.findings.add_mistake(join_path(path, name), value, attribute.cite(attribute.domain.accepted))
            else:
                read = self._read_value(path, name, attribute, value)
                first = spellings.setdefault(attribute.name, name)
                if first != name and not is_same(accepted[attribute.name], read):
                    mistaken.add(attribute.name)
                    self.findings.add_mistake(
                        join_path(path, name), value, f"what {first} says, which is the same attribute"
                    )
                accepted[attribute.name] = read
        return accepted, mistaken

    def _read_value(self, path: str, name: str, attribute: Attribute, value: Any) -> Any:
        """Normalizes a value, and negates it if the document gives it under a negated alias."""
        read = attribute.domain.normalize(value)
        for alias in attribute.aliases:
            if alias.name == name:
                if alias.note:
                    self.findings.warnings.append(f"{join_path(path, name)}: {alias.note}")
                return not read if alias.negated else read
        return read

    def _support(self, attribute: Attribute) -> Support:
        return attribute.support_on(self.target, compiles=self.compiles)

    def _refuses(self, path: str, attribute: Attribute, value: Any, default: Any) -> bool:
        """Whether the target can never take a value, which is a mistake."""
        support = self._support(attribute)
        if support.level != "refused" or is_same(value, default):
            return False
        only = "unset" if default is None else show(default)
        self.findings.add_mistake(path, value, attribute.cite(f"{only}: {support.reason}"))
        return True

    def _validate_support(self, path: str, attribute: Attribute, value: Any, default: Any) -> None:
        """Notes what the target makes of a value that it can take."""
        support = self._support(attribute)
        if attribute.deprecated:
            held = "" if is_same(value, default) else f"; {show(value)} is ignored, and {show(default)} holds"
            self.findings.warnings.append(f"{path}: deprecated, {attribute.deprecated}{held}")
        elif support.level == "hint":
            if not is_same(value, default if support.acts_as is None else support.acts_as):
                self.findings.add_hint(Hint(path, value, support.reason))
        elif not support.serves(value, default):
            asked = "set" if isinstance(value, Mapping) else show(value)
            self.findings.add_unserved(path, asked, support.values or (default,))

    def _note_undocumented(self, path: str, table: ConfigTable, accepted: Mapping[str, Any]) -> None:
        names = [
            attribute.name
            for attribute in table.unrecorded
            if attribute.name in accepted and attribute.support_on(self.target).level == "later"
        ]
        if names:
            self.findings.warnings.append(
                f"{path or 'config'}: no document names {', '.join(names)}, which NxD Inference's code has; served at "
                f"the default only"
            )


def join_path(path: str, name: str) -> str:
    """Joins the path of an attribute; shows a name that is no short ASCII identifier escaped and cut."""
    readable = name if name.isidentifier() and name.isascii() and len(name) <= 64 else show(name)
    return f"{path}.{readable}" if path else readable


def _suggest_name(name: str, table: ConfigTable) -> str:
    """Says in words what a table accepts in place of `name`."""
    known = [*table.by_name]
    if table is INFERENCE_CONFIG:
        known += [*list_model_attributes(), "transformers_neuronx"]
    paths = _find_paths(_FOREIGN_NAMES.get(name, name))
    similar = [] if len(name) > _MAX_NAME_CHARS else difflib.get_close_matches(name, known, n=1)
    if similar and not paths:
        return f"did you mean {similar[0]!r}?"
    if paths:
        return f"{_ANY_NAME}; did you mean {paths[0]}?"
    return f"{_ANY_NAME}; the model's own attributes come from the checkpoint's config.json"


def _find_paths(name: str) -> list[str]:
    """Finds attributes with this name, outermost first: callers often give one a level too high or too low."""
    found = [f"{name} at the top level"] if name in list_model_attributes() else []
    queue, seen = [("", INFERENCE_CONFIG)], set()
    while queue:
        path, table = queue.pop(0)
        if table.class_name in seen:
            continue
        seen.add(table.class_name)
        if name in table.by_name:
            found.append(f"{path}{name}")
        queue += [
            (f"{path}{attribute.name}.", TABLES[attribute.domain.table])
            for attribute in table.attributes
            if attribute.domain.table
        ]
    return found
