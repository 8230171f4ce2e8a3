"""Constraints hold for the text that clients get, whatever the decoder makes of a token's spelling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, normalizers

from execution.text.constraint import Constraint
from execution.text.matchers import Matchers
from execution.text.tokenizer import Tokenizer
from tests.checkpoints.tokenizer_files import byte_fallback, byte_level
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
        [decoders.Metaspace()],
        [decoders.BPEDecoder()],
        [*METASPACE, decoders.Strip(" ", 2, 0)],
        [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)],
    ],
    ids=["word-piece", "metaspace", "bpe", "two spaces", "without bytes"],
)
def test_a_decoder_whose_text_depends_on_other_tokens_is_refused(tmp_path: Path, decoder: list[object]) -> None:
    with pytest.raises(ValueError, match="depends on the tokens beside them"):
        Matchers(save(byte_fallback(), tmp_path, decoder), 300, (EOS,))
