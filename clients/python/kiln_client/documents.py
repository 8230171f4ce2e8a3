"""Reads and writes YAML and JSON documents, configurations and conversations, and replaces values in them.

Text that is JSON is read as JSON, other text as YAML with the scalars of YAML 1.2: `1e-5` is a number; `yes`, `010` and
dates are text. Repeated keys, keys other than text, tags, and aliases that stand for very much are errors. Every parsed
document can be written as JSON. Infinities are numbers in configurations only; Python's JSON spells them `Infinity`, as
NxD Inference's files do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import yaml

from kiln_client.errors import DocumentInvalid, OverrideInvalid

Document: TypeAlias = dict[str, Any] | list[Any]

#: What all aliases of a YAML document may stand for: nodes, and one more for each 100 characters of a scalar. Aliases
#: of aliases multiply, so that a few lines can stand for more than memory holds.
MAX_ALIASED_NODES: Final = 100_000
_NODE_CHARS: Final = 100


def parse_document(text: str, *, source: str, reason: str, field: str, infinities: bool = False) -> Document:
    """Parses a document whose top level is a mapping or a list.

    The error names `source`, `reason` and `field`. Infinities are numbers only with `infinities`.

    Raises:
        DocumentInvalid: The text is neither YAML nor JSON, or holds NaN, infinities or cycles, which JSON cannot.
    """
    document = parse_value(text, source=source, reason=reason, field=field, infinities=infinities)
    if not isinstance(document, dict | list):
        raise DocumentInvalid(source, f"it holds only {json.dumps(document)}", reason=reason, field=field)
    return document


def parse_value(text: str, *, source: str, reason: str, field: str, infinities: bool = False) -> Any:
    """Parses a document whose top level may also be a scalar; see `parse_document`."""
    try:
        document = _parse(text, is_json=source.endswith(".json"))
        write_json(document, infinities=infinities)
    except yaml.YAMLError as error:
        raise DocumentInvalid(source, _yaml_detail(error), reason=reason, field=field) from None
    except RecursionError:
        raise DocumentInvalid(source, "it is nested too deeply", reason=reason, field=field) from None
    except ValueError as error:
        raise DocumentInvalid(source, str(error), reason=reason, field=field) from None
    return document


def write_json(document: Any, *, infinities: bool = False) -> str:
    """Writes JSON text. Raises ValueError for what JSON cannot hold, which infinities are without `infinities`."""
    text = json.dumps(document, allow_nan=infinities)
    if infinities:
        json.loads(text, parse_constant=lambda name: _refuse_nan() if name == "NaN" else 0.0)
    return text


def _refuse_nan() -> NoReturn:
    raise ValueError("Out of range float values are not JSON compliant: nan")


def _parse(text: str, *, is_json: bool) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        if is_json:
            raise
    return yaml.load(text, _Loader)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"repeated key {', '.join(map(repr, repeated))}")
    return mapping


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - filled once, below

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_aliased = 0
        #: Nodes that a composed node stands for, aliases replaced, by its identity; the document's root keeps them all.
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if getattr(event, "tag", None) is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the tag {event.tag!r}", mark)
        node = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = self._measure(node)
            return node
        # A node without a size is still being composed: it holds itself, which is found later.
        self._num_aliased += self._sizes.get(id(node), 1)
        if self._num_aliased > MAX_ALIASED_NODES:
            problem = f"aliases stand for more than {MAX_ALIASED_NODES} nodes"
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        return node

    def _measure(self, node: yaml.Node | None) -> int:
        if isinstance(node, yaml.MappingNode):
            return 1 + sum(self._sizes.get(id(one), 1) for pair in node.value for one in pair)
        if isinstance(node, yaml.SequenceNode):
            return 1 + sum(self._sizes.get(id(one), 1) for one in node.value)
        return 1 + (len(node.value) // _NODE_CHARS if isinstance(node, yaml.ScalarNode) else 0)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag.endswith(":merge"):
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r}, no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"repeated key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# The core schema of YAML 1.2, and merge keys. PyYAML's own resolvers follow YAML 1.1, where `1e-5` is text, `010` is 8
# and `12:30` is 750.
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _yaml_detail(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    problem = error.problem or error.context or "a syntax error"
    mark = error.problem_mark or error.context_mark
    return problem if mark is None else f"{problem}, in line {mark.line + 1}, column {mark.column + 1}"


@dataclass(frozen=True, slots=True)
class Override:
    """One value of a configuration that replaces another, as in NxD Inference's `load(path, **kwargs)`.

    `path` has the names from the top level, such as `("neuron_config", "seq_len")`; `value` is of JSON's types.
    """

    path: tuple[str, ...]
    value: Any


def parse_override(text: str) -> Override:
    """Reads `neuron_config.seq_len=256`; the value is YAML."""
    path, equals, value = text.partition("=")
    names = tuple(path.strip().split("."))
    if not equals or not all(names):
        raise OverrideInvalid(text, f"got {text!r}; accepted: PATH=VALUE, such as neuron_config.seq_len=256")
    try:
        parsed = parse_value(value, source="-", reason="CONFIG_INVALID", field="override", infinities=True)
    except DocumentInvalid as error:
        raise OverrideInvalid(text, f"got {value!r}; accepted: a value in YAML or JSON ({error.message})") from None
    return Override(names, parsed)


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns a copy of the document with the overrides applied in order.

    An override replaces a whole value and creates missing objects on the way to it. The server validates their names.
    """
    changed = dict(document)
    for override in overrides:
        _replace(changed, override)
    return changed


def _replace(document: dict[str, Any], override: Override) -> None:
    place = document
    *way, last = override.path
    for depth, name in enumerate(way):
        inner = place.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            outer = ".".join(way[: depth + 1])
            raise OverrideInvalid(".".join(override.path), f"got {inner!r} at {outer}; accepted: an object there")
        # Copied, so that the caller's document, and objects that YAML anchors share, do not change.
        place[name] = dict(inner or {})
        place = place[name]
    place[last] = override.value
