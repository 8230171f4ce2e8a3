"""Writes docs/config.md from the code: `python -m tests.architecture.config_table`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from compiler_svc.config import MoENeuronConfig, NeuronConfig
from compiler_svc.config.attribute import TARGET_KINDS, Attribute, ConfigTable, Support, read_attributes
from compiler_svc.config.interchange.saved_form import FLAT_NAMES
from compiler_svc.config.rules import RULES, Rule
from compiler_svc.config.tables import MODEL_ATTRIBUTES, TABLES
from compiler_svc.config.tables.differences import DIFFERENCES
from compiler_svc.config.tables.transformers_neuronx import (
    CODE_OPTIONS,
    CODE_SUBOPTIONS,
    TRANSFORMERS_NEURONX,
    CodeOption,
)
from tests.repository import ROOT

PAGE = ROOT / "docs" / "config.md"
HEAD = """\
# Configuration

Made from the code by `make docs`; a test compares the two.

A configuration is JSON or YAML, or the message `kiln.config.v1.InferenceConfig`; names are those of NxD Inference. It
is validated as a whole: one error lists every mistake with field, value, what would be accepted and the document that
says so. Unknown names are mistakes, and warnings in a file that NxD Inference saved; null is unset.

What a target makes of an attribute:

- **honoured**: the value counts.
- **hint**: the value is ignored, and the result of the compile or the plan says so.
- **later**: accepted at its default; other values are refused with reason FEATURE_NOT_SERVED until later work.
- **planned**: a plan depends on the value, or on what is inside if it is an object.
- **refused**: other values than the default are mistakes there.

Plans for Neuron targets take more than compiles do. A compile for them honours what cpu honours, because it has the
same graphs, and {honoured}.
Of what is *later* on cpu, and of all that chooses kernels, layouts or flags of the compiler, it takes the default only
and refuses other values with reason FEATURE_NOT_SERVED; a plan on a host that
can compile warns of each.

What no document says of trn3 is taken from trn2 and unverified: logical cores of two, the tensor-parallel degrees.
"""


def render_page() -> str:
    """The whole page."""
    parts = [
        HEAD.format(honoured=_list_compiled()),
        *map(_render_class, _classes()),
        _render_aliases(),
        _render_transformers_neuronx(),
    ]
    parts += [_render_differences(), _render_unrecorded(), _render_model_attributes()]
    return "\n".join(parts)


def _list_compiled() -> str:
    """The attributes that compiles for Neuron honour and cpu does not."""
    rows = [
        row for row in read_attributes(NeuronConfig) if row.compiled is not None and row.compiled.level == "honoured"
    ]
    return ", ".join(f"`{row.name}`" for row in rows)


def _classes() -> Iterator[ConfigTable]:
    """The documents' classes: NeuronConfig's table without, and MoENeuronConfig's with the attributes of experts."""
    for table in TABLES.values():
        if table.cls is NeuronConfig:
            dense = read_attributes(NeuronConfig)
            yield ConfigTable(NeuronConfig, dense)
            yield ConfigTable(MoENeuronConfig, table.attributes[len(dense) :])
        else:
            yield table


def _render_class(table: ConfigTable) -> str:
    rules = RULES.get("NeuronConfig" if table.class_name == "MoENeuronConfig" else table.class_name, ((), ()))[0]
    rows = (
        [
            f"`{attribute.name}`",
            attribute.domain.accepted,
            _default(attribute),
            attribute.derivation or "—",
            "; ".join(_rules_of(attribute.name, rules)) or "—",
            *(_support(attribute.support_on(target), attribute) for target in TARGET_KINDS),
            attribute.section or "—",
        ]
        for attribute in table.attributes
    )
    heads = ("attribute", "accepted", "default", "derivation", "rules", *TARGET_KINDS, "document")
    own = {attribute.name for attribute in table.attributes}
    paths = [(rule.reads[0], _without_values(rule.accepted)) for rule in rules if "." in rule.reads[0]]
    across = [f"- `{path}`: {accepted}\n" for path, accepted in paths if path.partition(".")[0] in own]
    return f"## {table.class_name}\n\n{_table(heads, rows)}" + ("\n" + "".join(across) if across else "")


def _default(attribute: Attribute) -> str:
    if attribute.derivation:
        return "derived"
    return "unset" if attribute.default is None else f"`{_json(attribute.default)}`"


def _rules_of(name: str, rules: Iterable[Rule]) -> Iterator[str]:
    return (_without_values(rule.accepted) for rule in rules if rule.reads[0] == name)


def _without_values(accepted: str) -> str:
    """What a rule accepts, as it holds for every configuration."""
    text = re.sub(r",? which is \{[^{}]*\}( / \{[^{}]*\})?| = \{.*\}|; it is '?\{[^{}]*\}'?", "", accepted)
    text = re.sub(r"\b(\w+), \{\1\}", r"\1", text)
    text = re.sub(r"\b(\w+) is \{\1\}", r"\1 is given", text)
    return re.sub(r"'?\{([^{}]*)\}'?", lambda match: f"`{_path(match[1])}`", text)


def _path(placeholder: str) -> str:
    return placeholder.replace("[", ".").replace("]", "")


def _support(support: Support, attribute: Attribute) -> str:
    if attribute.deprecated:
        return f"deprecated, {attribute.deprecated}"
    if support.values:
        return f"{support.level}: {', '.join(map(str, support.values))}; others later"
    return f"{support.level}: {support.reason}" if support.reason else support.level


def _render_aliases() -> str:
    rows = (
        [
            f"`{alias.name}`",
            f"`{table.class_name}.{attribute.name}`" + (", negated" if alias.negated else ""),
            "with a warning" if alias.note else "a spelling",
        ]
        for table in _classes()
        for attribute in table.attributes
        for alias in attribute.aliases
    )
    keywords = (
        [f"`{name}`", f"`MoENeuronConfig.{table}.{inside}`", "a spelling"]
        for table, names in FLAT_NAMES.items()
        for name, inside in names.items()
    )
    rows = chain(rows, keywords)
    return f"## Other names\n\n{_table(('name', 'attribute', 'accepted'), rows)}"


def _render_transformers_neuronx() -> str:
    head = (
        "## Transformers NeuronX\n\nThe section `transformers_neuronx` takes options under its names. An option may "
        "not be given under both.\n"
    )
    rows = (
        [f"`{class_name}.{option.name}`", option.domain.accepted, option.becomes, option.document]
        for class_name, options in TRANSFORMERS_NEURONX.items()
        for option in options
    )
    code_head = (
        "\nThe library's code has these, too, of the classes of all families; its guide does not name them, and the "
        "message has no fields for them.\n"
    )
    placed = chain(
        ((option.name, option) for option in CODE_OPTIONS),
        ((f"{name}.{option.name}", option) for name, options in CODE_SUBOPTIONS.items() for option in options),
    )
    code = ([f"`{path}`", option.domain.accepted, _outcome(option)] for path, option in placed)
    documented = _table(("option", "accepted", "becomes", "document"), rows)
    return f"{head}\n{documented}{code_head}\n{_table(('option', 'accepted', 'what becomes of it'), code)}"


def _outcome(option: CodeOption) -> str:
    if option.means is not None:
        meanings = ", ".join(f"`{json.dumps(value)}`: `{json.dumps(meant)}`" for value, meant in option.means.items())
        return f"honoured: {option.becomes} ({meanings})"
    if option.becomes:
        return f"honoured: {option.becomes}"
    only = "unset" if option.only is None else f"`{str(option.only).lower()}`"
    return f"hint: {option.hint}" if option.hint else f"refused unless {only}: {option.refused}"


def _render_differences() -> str:
    rows = (
        [f"`{one.attribute}`", "; ".join(f"{source}: {said}" for source, said in one.sayings), one.kiln]
        for one in DIFFERENCES
    )
    return f"## Where the sources differ\n\n{_table(('attribute', 'what they say', 'Kiln'), rows)}"


def _render_unrecorded() -> str:
    head = (
        "## Names that no document has\n\nNxD Inference's code of SDK 2.23 to 2.29 has these. They are accepted at "
        "their defaults with a note, refused otherwise (hints aside), and not recorded.\n"
    )
    rows = (
        [
            f"`{table.class_name}.{attribute.name}`",
            _default(attribute),
            _support(attribute.support_on("cpu"), attribute),
        ]
        for table in TABLES.values()
        for attribute in table.unrecorded
    )
    return f"{head}\n{_table(('attribute', 'default', 'support'), rows)}"


def _render_model_attributes() -> str:
    names = ", ".join(f"`{name}`" for name in sorted(MODEL_ATTRIBUTES))
    return (
        "## Model attributes\n\nAt the top level of a document these replace what the checkpoint's `config.json` says: "
        f"{names}.\n"
    )


def _table(heads: Iterable[str], rows: Iterable[list[str]]) -> str:
    lines = [list(heads), ["---"] * len(list(heads)), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _json(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[]" if not value else str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    PAGE.write_text(render_page())
