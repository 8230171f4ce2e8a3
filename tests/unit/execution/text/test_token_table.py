"""Decoding by tables against the decoders of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from execution.text.decoder import TokenDecoder
from execution.text.detokenizer import Detokenizer
from execution.text.table_builder import build_table
from execution.text.token_table import make_decoder
from tests.checkpoints.tokenizer_files import byte_fallback, byte_level, metaspace, trained_byte_fallback
from tests.repository import ROOT


def with_added_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Some special, some not, with characters that are bytes of the byte-level alphabet and some that are none."""
    tokenizer.add_special_tokens([AddedToken("<｜end▁of▁turn｜>", special=True), AddedToken("[é]", special=True)])
    tokenizer.add_tokens([AddedToken("naïve café"), AddedToken(" two words "), AddedToken("Ġé"), AddedToken("🙂")])
    return tokenizer


def with_decoder(tokenizer: tokenizers.Tokenizer, *steps: Any) -> tokenizers.Tokenizer:
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


FALLBACK = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
TOKENIZERS = {
    "kiln-tiny": tokenizers.Tokenizer.from_file(str(ROOT / "examples/models/kiln-tiny/tokenizer.json")),
    "Llama 3, Qwen": with_added_tokens(byte_level()),
    "byte-level in a sequence": with_decoder(byte_level(), decoders.ByteLevel()),
    "Llama 2, Mistral, Phi 3": with_added_tokens(byte_fallback()),
    "Gemma": with_decoder(with_added_tokens(byte_fallback()), *FALLBACK),
    "XGLM": with_added_tokens(metaspace()),
    "several marks in a token": with_decoder(trained_byte_fallback(), decoders.Metaspace(prepend_scheme="first")),
    "all marks kept": with_decoder(with_added_tokens(metaspace()), decoders.Metaspace(prepend_scheme="never")),
    "two spaces stripped": with_decoder(byte_fallback(), *FALLBACK, decoders.Strip(" ", 2, 0)),
}
DECODERS = {}
for name, tokenizer in TOKENIZERS.items():
    table = build_table(tokenizer)
    assert table is not None, name
    DECODERS[name] = make_decoder(table)


@st.composite
def token_lists(draw: st.DrawFn, tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Any ids, those that the tokenizer lacks included, and those of texts."""
    size = tokenizer.get_vocab_size()
    pieces = st.one_of(
        st.lists(st.integers(0, size + 5), max_size=12),
        st.text(max_size=10).map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids),
        st.sampled_from([*tokenizer.get_added_tokens_decoder()]).map(lambda token_id: [token_id]),
    )
    return [token_id for piece in draw(st.lists(pieces, max_size=4)) for token_id in piece]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150)
def test_a_table_decodes_as_its_tokenizer(name: str, data: st.DataObject, skip: bool) -> None:
    token_ids = data.draw(token_lists(TOKENIZERS[name]))
    expected = TOKENIZERS[name].decode(token_ids, skip_special_tokens=skip)
    assert DECODERS[name].decode(token_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=50)
def test_a_table_streams_as_its_tokenizer(name: str, data: st.DataObject) -> None:
    token_ids = data.draw(token_lists(TOKENIZERS[name]))
    assert stream(DECODERS[name], token_ids) == stream(Library(TOKENIZERS[name]), token_ids)
    for token_id in token_ids:
        assert DECODERS[name].token_text(token_id) == Library(TOKENIZERS[name]).token_text(token_id)


@pytest.mark.parametrize(
    "steps",
    [
        (decoders.ByteLevel(), decoders.Replace("a", "b")),
        (decoders.ByteFallback(), decoders.Metaspace()),
        (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)),
        (decoders.WordPiece(),),
    ],
    ids=["changed bytes", "bytes and metaspace", "both ends stripped", "word pieces"],
)
def test_other_decoders_have_no_table(steps: Sequence[Any]) -> None:
    assert build_table(with_decoder(byte_level(), *steps)) is None


def test_a_tokenizer_without_decoder_has_no_table() -> None:
    assert build_table(tokenizers.Tokenizer(tokenizers.models.BPE())) is None


class Library(TokenDecoder):
    """What `tokenizers` itself decodes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def stream(decoder: TokenDecoder, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decoder.decode, decoder.decode_one)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]
