"""Grammars, and the tokens that they let come next, of the shipped model's tokenizer."""

from __future__ import annotations

import json
import re
from functools import cache

import jsonschema
import pytest

from execution.text import matchers as module
from execution.text.constraint import ConstrainedSequence, Constraint, ConstraintRefused, NextTokens
from execution.text.matchers import Matchers
from execution.text.tokenizer import Tokenizer
from tests.constraints.schemas import CHOSEN, Case, generate
from tests.constraints.writer import Writer
from tests.repository import ROOT

TOKENIZER = Tokenizer(ROOT / "examples/models/kiln-tiny/tokenizer.json")
VOCAB_SIZE, EOS = 2048, (2, 3)


@cache
def writer() -> Writer:
    return Writer(TOKENIZER, VOCAB_SIZE, EOS)


def follow(number: int, start: int, tokens: list[int], constraint: Constraint | None = None) -> NextTokens:
    return writer().follow(number, start, tokens, constraint)


def allowed(mask: bytes) -> list[int]:
    return writer().allowed(mask)


def count_ends(cases: list[Case]) -> int:
    """How many values end within eight times the shortest one's tokens; checks all that do."""
    num_ended = 0
    for seed, case in enumerate(cases):
        shortest = TOKENIZER.encode(case.shortest_text, add_special_tokens=False)
        jsonschema.validate(case.shortest, case.schema)
        text = writer().write(Constraint(kind="json_schema", text=case.text), seed, 8 * (len(shortest) + 1))
        if text is not None:
            jsonschema.validate(json.loads(text), case.schema)
            num_ended += 1
    return num_ended


def test_schemas_give_values() -> None:
    generated = list(generate(200, seed=31))
    assert (len(CHOSEN), len(generated)) == (50, 200)
    assert count_ends([*CHOSEN, *generated]) >= 0.95 * 250


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.text[:40])
def test_the_shortest_value_is_let_through(case: Case) -> None:
    tokens = TOKENIZER.encode(case.shortest_text, add_special_tokens=False)
    found = follow(-1, 0, [], Constraint(kind="json_schema", text=case.text))
    index = 0
    while index < len(tokens):
        assert tokens[index - len(found.forced) : index] == found.forced
        assert tokens[index] in allowed(found.mask), (case, tokens[:index])
        found = follow(-1, index, [tokens[index]])
        index += 1 + len(found.forced)
    assert EOS[0] in allowed(found.mask)
    writer().matchers.forget([-1])


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(kind="regex", text="(yes|no){1,2}"), "(yes|no){1,2}"),
        (Constraint(kind="choices", choices=("yes", "no", 'a "quote"', "new\nline/\\", "né")), None),
        (Constraint(kind="grammar", text='start: "a" item+\nitem: "b" | "c"'), "a[bc]+"),
        (Constraint(kind="grammar", text='root ::= "a" item+\nitem ::= "b" | "c"'), "a[bc]+"),
    ],
    ids=["regex", "choices", "lark", "ebnf"],
)
def test_other_kinds_are_kept(constraint: Constraint, expected: str | None) -> None:
    for seed in range(20):
        text = writer().write(constraint, 1000 + seed, 60)
        assert text is not None
        assert text in constraint.choices if expected is None else re.fullmatch(expected, text)


def test_json_has_white_space_only_if_it_may() -> None:
    tight, loose = (Constraint(kind="json_object", json_whitespace=is_loose) for is_loose in (False, True))
    brace = TOKENIZER.encode("{", add_special_tokens=False)
    space = TOKENIZER.encode(" ", add_special_tokens=False)[0]
    assert follow(2000, 0, brace, tight).state == "KNOWN"
    assert space not in allowed(follow(2001, 0, brace, tight).mask)
    assert space in allowed(follow(2002, 0, brace, loose).mask)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint(kind="json_schema", text="{"), "Expecting property name"),
        (Constraint(kind="json_schema", text="[1]"), "a schema is an object"),
        (Constraint(kind="json_schema", text="false"), "no value matches false"),
        (Constraint(kind="json_schema", text='{"minimum": 5, "maximum": 3, "type": "integer"}'), "Unsatisfiable"),
        (Constraint(kind="json_schema", text='{"not": {}, "x-guidance": {"lenient": true}}'), "not"),
        (Constraint(kind="json_schema", text='{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "oneOf"),
        (Constraint(kind="json_schema", text="[" * 5000), "recursion"),
        (Constraint(kind="regex", text="a(("), "unclosed group"),
        (Constraint(kind="regex", text="(?=a)a"), "look-around"),
        (Constraint(kind="regex", text=r"[^\s\S]"), "no text matches"),
        (Constraint(kind="grammar", text="start: other"), "unknown name"),
        (Constraint(kind="grammar", text="root ::= other"), "other"),
    ],
)
def test_what_cannot_be_kept_is_refused(constraint: Constraint, reason: str) -> None:
    with pytest.raises(ConstraintRefused, match=reason):
        writer().matchers.compile(constraint)


def test_a_sequence_is_followed_from_its_first_token_on() -> None:
    constraint = Constraint(kind="regex", text="ab*")
    assert follow(3000, 1, [5]).state == "UNKNOWN"
    a, b = (TOKENIZER.encode(letter, add_special_tokens=False) for letter in "ab")
    mask = follow(3000, 0, [*a, *b], constraint).mask
    assert follow(3000, 1, b).state == "UNKNOWN", "tokens are missing between those that it has and these"
    assert follow(3001, 0, [*a, *b], constraint).mask == mask
    assert follow(3001, 2, a).state == "FAILED"
    writer().matchers.forget([3001])
    assert follow(3001, 3, []).state == "UNKNOWN"


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.text[:40])
def test_forced_tokens_are_those_that_masks_leave(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so it is whether they come at once, or some at a time."""
    constraint = Constraint(kind="json_schema", text=case.text)
    texts = []
    for most in (module.MAX_FORCED, 3, 0):
        monkeypatch.setattr(module, "MAX_FORCED", most)
        texts.append([writer().draw(constraint, 4000 + seed, 60) for seed in range(3)])
    assert texts[0] == texts[1] == texts[2]


def test_a_sequence_that_has_to_end_is_forced_to() -> None:
    """If one token alone ends sequences."""
    first, *others = TOKENIZER.encode("yes", add_special_tokens=False)
    sequence = ConstrainedSequence(0, 0, [first], Constraint(kind="regex", text="yes"))
    for ends, forced in ((EOS[:1], [*others, EOS[0]]), (EOS, others)):
        ending = Matchers(TOKENIZER, VOCAB_SIZE, ends)
        while (found := ending.follow(sequence)).state == "BUILDING":
            pass
        assert (found.forced, allowed(found.mask)) == (forced, [*ends])


def test_a_vocabulary_of_another_size_than_the_models_has_masks_of_the_models() -> None:
    constraint = Constraint(kind="regex", text=".{3}")
    for vocab_size, num_words in ((1000, 32), (2100, 66)):
        other = Matchers(TOKENIZER, vocab_size, EOS)
        assert len(other.compile(constraint)) == 4 * num_words
