"""Writes what `kiln config reference` prints, from the tables: `python -m tests.architecture.config_reference`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from compiler_svc.config import MoENeuronConfig, NeuronConfig
from compiler_svc.config.attribute import TARGET_KINDS, Attribute, ConfigTable, Support, read_attributes
from compiler_svc.config.domains import JSON
from compiler_svc.config.interchange.saved_form import FLAT_NAMES
from compiler_svc.config.rule import Rule
from compiler_svc.config.tables import NEURON_CONFIG, RULES, TABLES, list_model_attributes
from compiler_svc.config.tables.transformers_neuronx import OPTIONS, Option
from compiler_svc.config.transformers_neuronx import SECTION
from targets.cpu import CPU
from tests.repository import ROOT

FILE = ROOT / "clients/python/kiln_client/cli/config_reference.json"
#: Keywords of NeuronConfig, by the attribute of an object inside that they stand for.
_KEYWORDS = {f"{table}.{inside}": name for table, names in FLAT_NAMES.items() for name, inside in names.items()}

_NEURON = ", ".join(kind for kind in TARGET_KINDS if kind != CPU.kind)

Row = dict[str, Any]


def render_reference() -> str:
    """The whole file: one attribute a line."""
    rows = [json.dumps({name: value for name, value in row.items() if value}) for row in list_rows()]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def list_rows() -> Iterator[Row]:
    """Every attribute of the tables, every option of Transformers NeuronX, and the model's attributes."""
    dense = read_attributes(NeuronConfig)
    for table in TABLES.values():
        rules = RULES.get(table.class_name, ((), ()))[0]
        for attribute in table.rows:
            is_moe = table.cls is NeuronConfig and attribute in table.attributes[len(dense) :]
            yield _render(MoENeuronConfig.__name__ if is_moe else table.class_name, table, attribute, rules)
    for option in OPTIONS:
        yield _render_option(option, SECTION)
        yield from (_render_option(one, f"{SECTION}.{option.name}") for one in option.inside)
    yield {
        "name": "model attributes",
        "also": sorted(list_model_attributes()),
        "takes": JSON.accepted,
        "note": "at the top level, in place of what the checkpoint's config.json says",
    }


def _render(class_name: str, table: ConfigTable, attribute: Attribute, rules: Iterable[Rule]) -> Row:
    keywords = [name for path, name in _KEYWORDS.items() if path in _find_paths(table, attribute)]
    return {
        "name": f"{class_name}.{attribute.name}",
        # A name may be one of the object's own and one of NeuronConfig's, too.
        "also": list(
            dict.fromkeys([*(("not " if one.negated else "") + one.name for one in attribute.aliases), *keywords])
        ),
        "takes": attribute.domain.accepted,
        "default": _default(attribute),
        "rules": [_without_values(rule) for rule in rules if _is_about(rule, attribute, table)],
        "targets": _group(attribute),
        "document": attribute.section or ("" if attribute in table.attributes else "none, NxD Inference's code alone"),
        "note": attribute.note,
    }


def _find_paths(table: ConfigTable, attribute: Attribute) -> set[str]:
    return {f"{row.name}.{attribute.name}" for row in NEURON_CONFIG.attributes if row.domain.table == table.class_name}


def _is_about(rule: Rule, attribute: Attribute, table: ConfigTable) -> bool:
    """Whether a rule is about an attribute, or is its table's and about an attribute of a table inside."""
    name, _, inside = rule.reads[0].partition(".")
    return name == attribute.name and attribute in table.attributes and bool(not inside or attribute.domain.table)


def _without_values(rule: Rule) -> str:
    """What a rule accepts, as it holds for every configuration."""
    text = re.sub(r",? which is \{[^{}]*\}( / \{[^{}]*\})?| = \{.*\}|; it is '?\{[^{}]*\}'?", "", rule.accepted)
    text = re.sub(r"\b(\w+), \{\1\}", r"\1", text)
    text = re.sub(r"\b(\w+) is \{\1\}", r"\1 is given", text)
    text = re.sub(r"'?\{([^{}]*)\}'?", lambda match: match[1].replace("[", ".").replace("]", ""), text)
    return f"{rule.reads[0]}: {text}" if "." in rule.reads[0] else text


def _default(attribute: Attribute) -> str:
    if attribute.derivation:
        return attribute.derivation
    return "unset" if attribute.default is None else json.dumps(attribute.default)


def _group(attribute: Attribute) -> Row:
    """What targets make of an attribute, those that make the same of it together."""
    said: dict[str, list[str]] = {}
    for target in TARGET_KINDS:
        plan, made = (_support(attribute.support_on(target, compiles=one), attribute) for one in (False, True))
        said.setdefault(plan if plan == made else f"{plan} (plans); {made} (compiles)", []).append(target)
    return {", ".join(targets).replace(_NEURON, "neuron"): text for text, targets in said.items()}


def _support(support: Support, attribute: Attribute) -> str:
    if attribute.deprecated:
        return f"deprecated, {attribute.deprecated}"
    if support.values:
        return f"{support.level}: {', '.join(map(str, support.values))}; others later"
    return f"{support.level}: {support.reason}" if support.reason else support.level


def _render_option(option: Option, path: str) -> Row:
    domain = option.domain
    if domain is None:
        *tables, name = option.becomes.split(".")
        table = TABLES["OnDeviceSamplingConfig"] if tables else NEURON_CONFIG
        domain = table.find(name).domain
    meanings = [f"{json.dumps(word)} is {json.dumps(meant)}" for word, meant in (option.means or {}).items()]
    outcome = option.note or option.becomes or (f"hint: {option.hint}" if option.hint else f"served: {option.served}")
    return {
        "name": f"{path}.{option.name}",
        "takes": domain.accepted,
        "outcome": f"{outcome} ({', '.join(meanings)})" if meanings else outcome,
        "document": option.document or "none, the library's code alone",
    }


if __name__ == "__main__":
    FILE.write_text(render_reference())
