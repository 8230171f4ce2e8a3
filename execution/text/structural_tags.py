"""Writes structural tags, in the form that xgrammar defined and engines take, as grammars of llguidance."""

# ruff: noqa: ARG002 - not every part depends on what is behind it
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from execution.text.constraint import ConstraintRefused
from execution.text.lark import LarkWriter


class _Node(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    @abstractmethod
    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        """Returns the expression of the part, behind which the text ends if `is_last`."""


class _ConstString(_Node, frozen=True, tag="const_string"):
    """A text."""

    value: str

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return lark.literal(self.value)


class _JsonSchema(_Node, frozen=True, tag="json_schema"):
    """JSON of a schema."""

    json_schema: dict[str, Any] | bool

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return lark.schema(self.json_schema)


class _Regex(_Node, frozen=True, tag="regex"):
    """A text that a regular expression matches."""

    pattern: str

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return lark.regex(self.pattern)


class _AnyText(_Node, frozen=True, tag="any_text"):
    """Text that contains none of some texts."""

    excludes: list[str] = []

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        if not is_last:
            raise ConstraintRefused("any_text is served at the end of a text, or as the content of a tag")
        return lark.text(self.excludes)


class _InOrder(_Node, frozen=True, tag="sequence"):
    """Parts, one behind the other."""

    elements: list[_Part]

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        written = [one.write(lark) for one in self.elements[:-1]]
        written += [one.write(lark, is_last=is_last) for one in self.elements[-1:]]
        return " ".join(written) or lark.literal("")


class _OneOf(_Node, frozen=True, tag="or"):
    """One of some parts."""

    elements: list[_Part]

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return lark.any_of([one.write(lark, is_last=is_last) for one in self.elements])


class _Maybe(_Node, frozen=True, tag="optional"):
    """A part, or nothing."""

    content: _Part

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return f"({self.content.write(lark, is_last=is_last)})?"


class _Star(_Node, frozen=True, tag="star"):
    """A part any number of times."""

    content: _Part

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return f"({self.content.write(lark)})*"


class _Plus(_Node, frozen=True, tag="plus"):
    """A part at least once."""

    content: _Part

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return f"({self.content.write(lark)})+"


class _Tag(_Node, frozen=True, tag="tag"):
    """A part between two texts."""

    begin: str
    content: _Part
    end: str

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        return self.write_rest(lark, self.begin)

    def write_rest(self, lark: LarkWriter, begin: str) -> str:
        """Returns the expression of the tag if of its first text `begin` is still to come."""
        if not isinstance(self.content, _AnyText):
            return f"{lark.literal(begin)} {self.content.write(lark)} {lark.literal(self.end)}"
        pieces, text = lark.split(self.end), lark.text(self.content.excludes)
        match pieces:
            case []:
                raise ConstraintRefused("any_text in a tag without an end is not served")
            case [str(end), *rest]:
                return f"{lark.literal(begin)} {lark.text_until(text, end)} {lark.join(rest)}"
        return f"{lark.literal(begin)} {text} {lark.join(pieces)}"


class _TriggeredTags(_Node, frozen=True, tag="triggered_tags"):
    """Text in which each trigger begins a tag. If there must be a tag, the first one comes at once."""

    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        if not is_last:
            raise ConstraintRefused("triggered_tags are served at the end of a text")
        text = lark.text(self.triggers)
        until = {trigger: _write_trigger(lark, text, trigger) for trigger in self.triggers}
        later = lark.any_of([self._write_tag(lark, tag, until) for tag in self.tags])
        first = lark.any_of([tag.write(lark) for tag in self.tags]) if self.at_least_one else ""
        if self.stop_after_first:
            return first or f"({later} | {text})"
        return f"{first} ({later})* {text}"

    def _write_tag(self, lark: LarkWriter, tag: _Tag, until: Mapping[str, str]) -> str:
        begun = [trigger for trigger in until if tag.begin.startswith(trigger)]
        if len(begun) != 1:
            raise ConstraintRefused(f"{tag.begin!r} begins with {len(begun)} of the triggers; accepted: with one")
        return f"{until[begun[0]]} {tag.write_rest(lark, tag.begin.removeprefix(begun[0]))}"


class _TagsWithSeparator(_Node, frozen=True, tag="tags_with_separator"):
    """Tags, with a text between each two."""

    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False

    def write(self, lark: LarkWriter, *, is_last: bool = False) -> str:
        one = lark.any_of([tag.write(lark) for tag in self.tags])
        more = "" if self.stop_after_first else f" ({lark.literal(self.separator)} {one})*"
        return f"({one}{more}){'' if self.at_least_one else '?'}"


_Part: TypeAlias = (
    _ConstString
    | _JsonSchema
    | _Regex
    | _AnyText
    | _InOrder
    | _OneOf
    | _Maybe
    | _Star
    | _Plus
    | _Tag
    | _TriggeredTags
    | _TagsWithSeparator
)


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A structural tag: a `format`, or in the older form structures and triggers."""

    type: Literal["structural_tag"] = "structural_tag"
    format: _Part | None = None
    structures: list[_Structure] | None = None
    triggers: list[str] | None = None


def write_structural_tag(text: str, special_ids: Mapping[str, int], *, has_whitespace: bool) -> str:
    """Writes the grammar, in Lark, of a structural tag in JSON.

    `special_ids` are tokens that are no text; where a text of the tag spells one, the grammar has that token. Raises
    ValueError if the structural tag is malformed, or says what cannot be kept.
    """
    lark = LarkWriter(special_ids, has_whitespace=has_whitespace)
    return lark.finish(_read(text).write(lark, is_last=True))


def _read(text: str) -> _Part:
    document = msgspec.json.decode(text, type=_Document)
    match document.format, document.structures, document.triggers:
        case [None, [*structures], [*triggers]]:
            tags = [_Tag(one.begin, _JsonSchema(one.schema), one.end) for one in structures]
            return _TriggeredTags(triggers, tags)
        case [part, None, None] if part is not None:
            return part
    raise ConstraintRefused("a structural tag has `format`, or `structures` and `triggers`")


def _write_trigger(lark: LarkWriter, text: str, trigger: str) -> str:
    """Returns the expression of a text up to a trigger, and the trigger."""
    match lark.split(trigger):
        case [int() as token_id]:
            return f"{text} {lark.join([token_id])}"
        case [str()]:
            return lark.text_until(text, trigger)
    raise ConstraintRefused(f"the trigger {trigger!r} is no text, nor one special token")
