"""Structural tags: what they let through, and what of them cannot be kept."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Final

import pytest

from execution.text.constraint import Constraint, ConstraintRefused
from execution.text.tokenizer import Tokenizer
from tests.constraints.writer import Writer
from tests.repository import ROOT

TOKENIZER: Final = Tokenizer(ROOT / "examples/models/kiln-tiny-tools/tokenizer.json")
VOCAB_SIZE, EOS = 2048, (2, 3)
DIGIT: Final = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}
PAIR: Final = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [2, 3]}}, "required": ["a", "b"]}
TEXT: Final = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any = DIGIT, end: str = ")") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: Any, triggers: tuple[str, ...] = ("call ",), **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **options}


def separated(*tags: Any, separator: str = ", ", **options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, **options}


def structural(part: Any) -> Constraint:
    return Constraint(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": part}))


@cache
def writer() -> Writer:
    return Writer(TOKENIZER, VOCAB_SIZE, EOS)


@pytest.mark.parametrize(
    ("part", "pattern"),
    [
        (const(""), ""),
        (const('a "b"\n/\\é🙂'), re.escape('a "b"\n/\\é🙂')),
        (DIGIT, r"\d"),
        ({"type": "json_schema", "json_schema": PAIR | {"additionalProperties": False}}, r'\{"a": 1, "b": \[2, 3\]\}'),
        ({"type": "regex", "pattern": "[ab]/\\/\n{2}"}, "[ab]//\n\n"),
        ({"type": "sequence", "elements": [const("a"), {"type": "or", "elements": [const("b"), DIGIT]}]}, r"a(b|\d)"),
        ({"type": "sequence", "elements": [{"type": "optional", "content": const("a")}, const("b")]}, "a?b"),
        ({"type": "sequence", "elements": [{"type": "plus", "content": tag("(")}, const(".")]}, r"(\(\d\))+\."),
        ({"type": "sequence", "elements": [{"type": "star", "content": const("ab")}, const(".")]}, r"(ab)*\."),
        (separated(tag("f("), tag("g("), at_least_one=True), r"[fg]\(\d\)(, [fg]\(\d\))*"),
        (separated(tag("f("), separator=""), r"(f\(\d\))*"),
        (separated(tag("f("), at_least_one=True, stop_after_first=True), r"f\(\d\)"),
        (separated(tag("f("), stop_after_first=True), r"(f\(\d\))?"),
        (triggered(tag("call f("), tag("call g("), at_least_one=True, stop_after_first=True), r"call [fg]\(\d\)"),
    ],
)
def test_text_matches_a_part(part: Any, pattern: str) -> None:
    texts = {writer().write(structural(part), seed, 60) for seed in range(20)} - {None}
    assert texts
    for text in texts:
        assert text is not None
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("part", "texts", "others"),
    [
        (
            triggered(tag("call f("), tag("tell(", end="]"), triggers=("call ", "tell")),
            ["", "Hello", "cal", "call f(5)", "a call f(5) b tell(7] c", "call f(1)call f(2)"],
            ["call ", "call g(5)", "tell", "a call f(5", "call f(x)", "call f(5)tell(7)"],
        ),
        (
            triggered(tag("call f("), stop_after_first=True),
            ["Hello", "a call f(5)"],
            ["call f(5) b", "call f(1)call f(2)", "call f"],
        ),
        (triggered(tag("call f("), at_least_one=True), ["call f(5)", "call f(5) b call f(6)"], ["", "a call f(5)"]),
        ({"type": "any_text", "excludes": ["<t>", "no"]}, ["", "<t", "n o", "yes\n"], ["<t>", "a <t> b", "a no"]),
        (tag("<think>", TEXT, "</think>"), ["<think></think>", "<think>a < </thin</think>"], ["<think>a", "</think>"]),
        (
            {"type": "sequence", "elements": [tag("", TEXT, "<end>"), DIGIT]},
            ["a\nb<end>5", "<end>5"],
            ["a<end>", "a<end>b<end>5"],
        ),
        # The special token, not its spelling.
        (triggered(tag("<|user|>f("), triggers=("<|user|>",)), ["a <|user|>f(5) b"], ["<|user|>", "<|user|>g"]),
        (tag("<|user|>", TEXT, "<|system|>."), ["<|user|>a<|system|>."], ["<|user|>a", "<|user|>a<|system|>"]),
    ],
)
def test_triggers_and_ends_are_found_in_text(part: Any, texts: list[str], others: list[str]) -> None:
    constraint = structural(part)
    assert [text for text in texts if not writer().lets_through(constraint, text)] == []
    assert [text for text in others if writer().lets_through(constraint, text)] == []


def test_forms_of_other_engines() -> None:
    older = {"structures": [{"begin": "<f>", "schema": {"const": 5}, "end": "</f>"}], "triggers": ["<f"]}
    bare = {
        "format": triggered(tag("<f>", {"type": "json_schema", "json_schema": {"const": 5}}, "</f>"), triggers=("<f",))
    }
    for document in (older, older | {"type": "structural_tag"}, bare):
        constraint = Constraint(kind="structural_tag", text=json.dumps(document))
        assert writer().lets_through(constraint, "a <f>5</f> b")
        assert not writer().lets_through(constraint, "a <f>6</f> b")


def test_json_may_have_white_space() -> None:
    constraint = structural({"type": "json_schema", "json_schema": PAIR})
    loose = Constraint(kind="structural_tag", text=constraint.text, json_whitespace=True)
    for text, is_spaced in (
        ('{"a": 1, "b": [2, 3]}', True),
        ('{"a":1,"b":[2,3]}', False),
        ('{ "a": 1, "b": [2,3]}', False),
    ):
        assert writer().lets_through(constraint, text) == is_spaced
        assert writer().lets_through(loose, text)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"format": {"type": "grammar", "grammar": "root ::= a"}}, r"Invalid value 'grammar' - at `\$\.format\.type`"),
        ({"format": DIGIT | {"style": "qwen_xml"}}, r"unknown field `style` - at `\$\.format`"),
        ({"format": {"type": "regex"}}, "missing required field `pattern`"),
        ({"format": {"type": "regex", "pattern": "a(("}}, "unclosed group"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "not"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "no value matches false"),
        ({"format": {"type": "sequence", "elements": [TEXT, const("a")]}}, "any_text is served at the end"),
        ({"format": tag("a", TEXT, "")}, "any_text in a tag without an end"),
        ({"format": tag("a", triggered(tag("call f(")), ".")}, "triggered_tags are served at the end"),
        ({"format": triggered(tag("f("))}, r"'f\(' begins with 0 of the triggers"),
        ({"format": triggered(tag("call f("), triggers=("call ", "call"))}, "begins with 2 of the triggers"),
        ({"format": triggered(tag("call f("), triggers=("",))}, "a trigger or an excluded text is empty"),
        ({"format": triggered(tag("a<|user|>"), triggers=("a<|user|>",))}, "is no text, nor one special token"),
        ({"format": separated()}, "there are no tags"),
        ({"structures": []}, "has `format`, or `structures` and `triggers`"),
        ({"type": "json_object"}, "Invalid enum value"),
        ([], "Expected `object`"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(document: Any, reason: str) -> None:
    with pytest.raises(ConstraintRefused, match=reason):
        writer().matchers.compile(Constraint(kind="structural_tag", text=json.dumps(document)))
