"""Constraints hold for the text that clients get, whatever the decoder makes of a token's spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import jsonschema
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers

from execution.text.constraint import Constraint, ConstraintRefused
from execution.text.detokenizer import Detokenizer
from execution.text.lark import quote
from execution.text.matchers import Matchers
from execution.text.token_table import TableDecoder, make_decoder
from execution.text.tokenizer import Tokenizer
from tests.checkpoints.tokenizer_files import byte_fallback, byte_level, metaspace, trained_byte_fallback
from tests.constraints.schemas import generate
from tests.constraints.writer import Writer

EOS = 2
METASPACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def llama_2() -> tokenizers.Tokenizer:
    """A tokenizer that puts a space before each text, which its decoder takes off again."""
    library = byte_fallback()
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return library


def save(library: tokenizers.Tokenizer, directory: Path, decoder: Sequence[object] | None = None) -> Tokenizer:
    if decoder is not None:
        library.decoder = decoders.Sequence(list(decoder)) if len(decoder) > 1 else decoder[0]
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory / "tokenizer.json")


def make_writer(tokenizer: Tokenizer) -> Writer:
    return Writer(tokenizer, tokenizer.num_ids, (EOS,))


@pytest.mark.parametrize(
    "text", ["a cat", " a cat", "  a", "(a| a|on|é| ){1,3}", "(" + " |".join("abc") + ")+", "[a-c]{0,2}"]
)
@pytest.mark.parametrize("strips", [True, False])
def test_text_matches_though_the_decoder_strips_its_first_space(tmp_path: Path, text: str, strips: bool) -> None:
    writer = make_writer(save(llama_2(), tmp_path, None if strips else METASPACE))
    texts = {writer.write(Constraint(kind="regex", text=text), seed, 30) for seed in range(60)} - {None}
    assert texts
    for one in texts:
        assert one is not None
        assert re.fullmatch(text, one), one


def test_a_text_may_begin_with_a_token_whose_space_is_stripped(tmp_path: Path) -> None:
    writer = make_writer(save(llama_2(), tmp_path))
    for pattern, begins in {"a|b": ["▁", "▁a", "a", "b"], " a| b": ["▁"]}.items():
        mask = writer.matchers.compile(Constraint(kind="regex", text=pattern))
        spellings = {writer.tokenizer.token_of(one) for one in writer.allowed(mask)}
        assert {one for one in spellings if one and not one.startswith("<0x")} == set(begins)
    tokens = writer.tokenizer.encode("a", add_special_tokens=False)
    assert [writer.tokenizer.token_of(one) for one in tokens] == ["▁", "a"]
    assert writer.draw(Constraint(kind="regex", text="a"), 0, 5, tokens) == tokens


def test_added_tokens_with_text_are_text_and_special_ones_are_not(tmp_path: Path) -> None:
    library = byte_level()
    library.add_tokens([AddedToken("<tool>", special=False), AddedToken("<end>", special=False)])
    library.add_special_tokens(["<hidden>"])
    tokenizer = save(library, tmp_path)
    tool, end, hidden = map(library.token_to_id, ("<tool>", "<end>", "<hidden>"))
    writer = Writer(tokenizer, tokenizer.num_ids, (EOS, end))
    mask = set(writer.allowed(writer.matchers.compile(Constraint(kind="regex", text="(?s:.*)"))))
    assert tool in mask
    assert hidden not in mask
    # What ends a sequence is never a part of its text, also if it has some.
    for text in ("<end>.*", "<hidden>.*"):
        mask = set(writer.allowed(writer.matchers.compile(Constraint(kind="regex", text=text))))
        assert [tokenizer.token_of(one) for one in mask] == ["<"]
    assert writer.draw(Constraint(kind="regex", text="<tool>"), 0, 2, [tool]) == [tool]


@pytest.mark.parametrize(
    "decoder",
    [
        [decoders.WordPiece()],
        [decoders.BPEDecoder()],
        [*METASPACE, decoders.Strip(" ", 2, 0)],
        [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)],
    ],
    ids=["word-piece", "bpe", "two spaces", "without bytes"],
)
def test_a_decoder_whose_text_depends_on_other_tokens_is_refused(tmp_path: Path, decoder: list[object]) -> None:
    with pytest.raises(ValueError, match="depends on the tokens beside them"):
        Matchers(save(byte_fallback(), tmp_path, decoder), 300, (EOS,))


def with_decoder(library: tokenizers.Tokenizer, decoder: Any) -> tokenizers.Tokenizer:
    library.decoder = decoder
    return library


#: By what their decoders do with spaces. Those of one strip are Llama 2's, Mistral's and Phi-3's, without any Gemma's.
TRAINED: Final[dict[str, Callable[[], tokenizers.Tokenizer]]] = {
    "one stripped": trained_byte_fallback,
    "none stripped": lambda: with_decoder(trained_byte_fallback(), decoders.Sequence(METASPACE)),
    "mark of the first token": metaspace,
    "marks of the first token": lambda: with_decoder(trained_byte_fallback(), decoders.Metaspace()),
}
KINDS: Final = pytest.mark.parametrize("kind", TRAINED)


@cache
def clients_of(kind: str) -> tuple[Writer, TableDecoder]:
    """Returns what draws tokens, and what makes the text that clients get of them."""
    with TemporaryDirectory() as directory:
        tokenizer = save(TRAINED[kind](), Path(directory))
    table = tokenizer.make_table()
    assert table is not None
    return make_writer(tokenizer), make_decoder(table)


#: A special token.
MARK: Final = "<s>"


def stream(kind: str, constraint: Constraint, seed: int, max_tokens: int = 60) -> str | None:
    """Returns the text that clients get, token by token; None if it has not ended after so many."""
    writer, decoder = clients_of(kind)
    tokens = writer.draw(constraint, seed, max_tokens)
    if tokens is None:
        return None
    detokenizer = Detokenizer(decoder.decode_matched, decoder.decode_one)
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    assert text == writer.tokenizer.decode(tokens, skip_special_tokens=False).replace(MARK, "")
    return text


@KINDS
@pytest.mark.parametrize(
    "choices",
    [("cat", " cat", "  cat"), ("", " ", "  ", "   "), ("a  b", "Once upon a time", "Füße", '{"a b": 1}')],
    ids=["before", "alone", "within"],
)
def test_clients_get_every_choice_and_nothing_else(kind: str, choices: tuple[str, ...]) -> None:
    choices += ("日本",) if "stripped" in kind else ()
    texts = {stream(kind, Constraint(kind="choices", choices=choices), seed) for seed in range(150)}
    assert texts == set(choices)


@KINDS
@given(data=st.data(), seed=st.integers(0, 1 << 20))
@settings(max_examples=80, deadline=None)
def test_clients_get_one_of_any_choices(kind: str, data: st.DataObject, seed: int) -> None:
    letters = 'ab  é{}"' + ("日\n" if "stripped" in kind else "")
    choices = data.draw(st.lists(st.text(letters, max_size=7), min_size=1, max_size=4, unique=True))
    assert stream(kind, Constraint(kind="choices", choices=tuple(choices)), seed) in choices


@KINDS
@given(text=st.text('ab  é{}"', max_size=7), seed=st.integers(0, 1 << 20))
@settings(max_examples=20, deadline=None)
@example(text=" cat", seed=0)
def test_clients_get_all_text_behind_a_special_token(kind: str, text: str, seed: int) -> None:
    for value in (MARK + text, MARK * 2 + text + MARK, text + MARK):
        tag = {"format": {"type": "const_string", "value": value}}
        assert stream(kind, Constraint(kind="structural_tag", text=json.dumps(tag)), seed) == text
    assert stream(kind, Constraint(kind="grammar", text=f"start: {MARK} {quote(text)}"), seed) == text


@KINDS
def test_no_space_comes_before_a_special_token_that_begins_a_text(kind: str) -> None:
    writer, _ = clients_of(kind)
    for grammar, spellings in ((f'{MARK} " a"', [MARK]), (f"{MARK} | </s>", [MARK, "</s>"])):
        mask = writer.matchers.compile(Constraint(kind="grammar", text=f"start: {grammar}"))
        assert [writer.tokenizer.token_of(one) for one in writer.allowed(mask)] == spellings


@KINDS
def test_clients_get_text_that_matches(kind: str) -> None:
    pattern = "( |[a-c]| on|é){1,6}\\.?"
    texts = [stream(kind, Constraint(kind="regex", text=pattern), seed) for seed in range(100)]
    assert all(text is not None and re.fullmatch(pattern, text) for text in texts), texts
    assert {text[:1] == " " for text in texts if text} == {True, False}


@KINDS
def test_clients_get_json_that_validates(kind: str) -> None:
    num_ended = 0
    for seed, case in enumerate(generate(40, seed=5)):
        text = stream(kind, Constraint(kind="json_schema", text=case.text), seed, 300)
        if text is not None:
            jsonschema.validate(json.loads(text), case.schema)
            num_ended += 1
    assert num_ended >= 30


def test_what_no_token_spells_is_never_begun() -> None:
    """The tokenizer has no such character, and no bytes to write it with."""
    kind = "mark of the first token"
    texts = {stream(kind, Constraint(kind="choices", choices=("cat", "日本")), seed) for seed in range(20)}
    assert texts == {"cat"}


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(kind="choices", choices=("cat 日本", "日", "語")),
        Constraint(kind="regex", text="a(日|日本)"),
        Constraint(kind="json_schema", text='{"const": "a日"}'),
        Constraint(kind="json_schema", text='{"properties": {"日": {}}, "required": ["日"], "type": "object"}'),
        Constraint(kind="structural_tag", text='{"format": {"type": "const_string", "value": "<s>a<s>日"}}'),
    ],
    ids=lambda one: one.text or "choices",
)
def test_what_wants_a_character_that_no_token_has_is_refused(constraint: Constraint) -> None:
    with pytest.raises(ConstraintRefused, match="no token of the model has '日'"):
        clients_of("mark of the first token")[0].matchers.compile(constraint)
    for kind in ("one stripped", "none stripped"):
        assert clients_of(kind)[0].matchers.compile(constraint), "bytes have it"


@pytest.mark.parametrize(("pattern", "character"), [("(a|b)日", "日"), ("(a|b)[日語]", ""), ("(a|b)é日", "日")])
def test_a_sequence_that_wants_a_character_that_no_token_has_ends_by_name(pattern: str, character: str) -> None:
    writer, _ = clients_of("mark of the first token")
    constraint = Constraint(kind="regex", text=pattern)
    assert writer.matchers.compile(constraint)
    found = writer.follow(-1, 0, writer.tokenizer.encode("a", add_special_tokens=False), constraint)
    assert (found.state, found.detail) == ("UNSPELLED", character)
    writer.matchers.forget([-1])
