"""Incremental text against the decoder on the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from execution.text.detokenizer import MAX_PENDING_TOKENS, REPLACEMENT, Detokenizer
from tests.checkpoints.tokenizer_files import byte_fallback, byte_level

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
KINDS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])


def pieces_of(tokenizer: tokenizers.Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, lambda token_id: str(tokenizer.decode([token_id])))
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@KINDS
@given(st.text(max_size=40))
@example("  two spaces  at both ends  ")
@example("👩‍👩‍👧 family")
def test_pieces_of_text_join_to_the_text(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces), "half a character got out"


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=MAX_PENDING_TOKENS))
def test_any_byte_level_tokens_join_to_the_decoders_text(token_ids: list[int]) -> None:
    """Special tokens and bytes that are no character included."""
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@given(st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=60))
def test_no_tokens_are_too_strange(token_ids: list[int]) -> None:
    """Broken bytes make the fallback decoder take back what it gave; everything else joins to its text."""
    text = "".join(pieces_of(BYTE_FALLBACK, token_ids))
    expected = BYTE_FALLBACK.decode(token_ids)
    assert text == expected or REPLACEMENT in expected


@KINDS
def test_text_comes_with_the_token_that_completes_it(tokenizer: tokenizers.Tokenizer) -> None:
    token_ids = tokenizer.encode("on 🙃 a", add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, token_ids)
    for count, piece in enumerate(pieces[:-1], start=1):
        before = "".join(pieces[:count])
        whole = tokenizer.decode(token_ids[:count])
        assert before == whole or (piece == "" and whole.endswith(REPLACEMENT))
    assert pieces[-1] == ""


def test_unfinished_character_shows_at_the_end() -> None:
    token_ids = BYTE_LEVEL.encode("a🙃", add_special_tokens=False).ids[:-1]
    pieces = pieces_of(BYTE_LEVEL, token_ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == REPLACEMENT


def test_endless_broken_bytes_do_not_pile_up() -> None:
    broken = BYTE_LEVEL.token_to_id("ÿ")
    detokenizer = Detokenizer(BYTE_LEVEL.decode)
    pieces = [detokenizer.push(broken) for _ in range(100)]
    assert len("".join(pieces)) >= 100 - MAX_PENDING_TOKENS
    assert len(detokenizer.window) <= 2 * MAX_PENDING_TOKENS


def test_first_space_is_stripped_once() -> None:
    token_ids = [BYTE_FALLBACK.token_to_id(token) for token in ("▁a", "▁a", "▁", "▁on")]
    assert pieces_of(BYTE_FALLBACK, token_ids) == ["a", " a", " ", " on", ""]
