"""A tokenizer as llguidance takes it: what each token adds to the text that clients get."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

from execution.text.token_table import find_dependence
from execution.text.tokenizer import Tokenizer

#: A tokenizer may put a space before a text, but puts none behind this, which is some tokens with such a space.
_GUARD: Final = "\n"
_MAX_GUARD_TOKENS: Final = 3


class Vocabulary:
    """The tokens of a model; the attributes without a comment are those that `TokenizerWrapper` reads.

    The text that a sequence of tokens has here is the text that clients get, but for `stripped`. Special tokens, which
    have no text, are apart from it.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> None:
        """Takes a tokenizer, at least so many tokens, and those that end a sequence.

        Raises ValueError if what a token adds to a text depends on more than the token.
        """
        table = tokenizer.make_table()
        dependence = find_dependence(table)
        if table is None or dependence is not None:
            raise ValueError(dependence)
        self._tokenizer = tokenizer
        special = {*table.special_ids, *eos}
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos[0]
        #: Ids of the special tokens, by their spelling.
        self.special_ids = {text: one for one in table.special_ids if (text := tokenizer.token_of(one))}
        #: What the decoder takes off the beginning of a text, once; empty if nothing.
        self.stripped = table.stripped if table.max_stripped else ""
        found = [table.find_texts(token or b"") for token in table.tokens] + [(b"", b"")] * (size - len(table.tokens))
        self._begins = [begin for _, begin in found]
        # A special token has a spelling, but is no text. One that loses more than `stripped` fits no grammar.
        self._texts = [
            text if one not in special and text in (begin, self.stripped.encode() + begin) else b""
            for one, (text, begin) in enumerate(found)
        ]
        self.tokens = [found[one][0] if one in special else text for one, text in enumerate(self._texts)]
        self._ids = {token: one for one, token in enumerate(self._texts) if token}
        # The library takes it that all bytes can be spelled. Those that the model cannot spell have ids beyond its own.
        for byte in (bytes([one]) for one in range(256)):
            if byte not in self._ids:
                self._ids[byte] = len(self.tokens)
                self.tokens.append(byte)
        self._max_bytes = max(map(len, self._ids))
        self.library = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=list(eos))

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text within a longer one; their bytes are those of the text."""
        # It tries bytes first, and goes on with text if they are refused.
        if not isinstance(text, str):
            raise TypeError
        wanted = text.encode()
        for guard in ("", _GUARD):
            ids = self._tokenizer.encode(guard + text, add_special_tokens=False)
            for begin in range(_MAX_GUARD_TOKENS + 1 if guard else 1):
                texts = [self._texts[one] for one in ids[begin:]]
                if all(texts) and b"".join(texts) == wanted:
                    return ids[begin:]
        return self._spell(wanted)

    def strips(self, token_id: int) -> bool:
        """Tells whether the decoder takes `stripped` off a text that begins with this token."""
        return bool(self.stripped) and self._texts[token_id] == self.stripped.encode() + self._begins[token_id]

    def find_unspelled(self, text: str) -> str:
        """Returns the first character of a text that no tokens have; empty if there is none."""
        characters, parts = self._spelled
        return next((one for one in text if one not in characters and not parts.issuperset(one.encode())), "")

    @cached_property
    def _spelled(self) -> tuple[set[str], set[int]]:
        """The characters of tokens, and the bytes of tokens that begin or end within a character."""
        characters, parts = set[str](), set[int]()
        for token in self._texts:
            try:
                characters.update(token.decode())
            except UnicodeDecodeError:
                parts.update(token)
        return characters, parts

    def _spell(self, wanted: bytes) -> list[int]:
        """Returns the longest token that the bytes begin with, and so on."""
        ids, begin = list[int](), 0
        while begin < len(wanted):
            lengths = range(min(self._max_bytes, len(wanted) - begin), 0, -1)
            length = next(one for one in lengths if wanted[begin : begin + one] in self._ids)
            ids.append(self._ids[wanted[begin : begin + length]])
            begin += length
        return ids
