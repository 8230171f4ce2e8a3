"""Decodes tokens by a table of their bytes, without a tokenizer.

A decoder of one of three kinds needs no more than such a table, and almost every checkpoint has one of them:
byte-level, whose tokens are bytes; byte-fallback, whose tokens are text apart from some for single bytes; and
metaspace, whose tokens are text with a mark for spaces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from execution.text.decoder import TokenDecoder
from execution.text.detokenizer import REPLACEMENT


class TokenTable(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of every token, and what the decoder does with them.

    Attributes:
        kind: Of byte-level tokens the bytes are joined and read as UTF-8. Byte-fallback tokens are text, except those
            in `byte_ids`, which are single bytes. Metaspace tokens are text with `marker` in it, which is a space, but
            nothing in the first token of a text.
        tokens: Bytes by token id; None for an id that has no token.
        special_ids: Tokens that decoding leaves out if it skips special tokens.
        stripped: A character that is stripped from the beginning of a text, at most `max_stripped` times.
    """

    kind: Literal["byte_level", "byte_fallback", "metaspace"]
    tokens: list[bytes | None]
    special_ids: list[int]
    byte_ids: list[int] = []
    stripped: str = " "
    max_stripped: int = 0
    marker: str = ""

    def find_texts(self, token: bytes) -> tuple[bytes, bytes]:
        """Returns what one of `tokens` adds to a text that others begin, and what it begins a text with."""
        if self.kind == "metaspace":
            marker = self.marker.encode()
            return token.replace(marker, b" "), token.replace(marker, b"")
        return token, token.removeprefix(self.stripped.encode()) if self.max_stripped else token


def find_dependence(table: TokenTable | None) -> str | None:
    """Says why the table of a tokenizer does not tell what each token adds to a text; None if it does.

    It tells, too, where one character is stripped: that is at the beginning of a text's first token.
    """
    if table is None or table.max_stripped > 1:
        return "the text of its tokens depends on the tokens beside them"
    return None


def make_decoder(table: TokenTable) -> TableDecoder:
    """Returns the decoder of a table."""
    return _DECODERS[table.kind](table)


class TableDecoder(TokenDecoder):
    """Turns tokens into text by a table."""

    def __init__(self, table: TokenTable) -> None:
        super().__init__()
        self._special_ids = frozenset(table.special_ids)

    def decode_matched(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens as a grammar reads it, which sees special tokens: what follows one begins no text.

        So nothing is stripped if the first token is special; else this is `decode`.
        """
        is_begun = token_ids and token_ids[0] in self._special_ids
        return self._decode_within(token_ids) if is_begun else self.decode(token_ids)

    @abstractmethod
    def _decode_within(self, token_ids: Sequence[int]) -> str:
        """Returns what tokens add to a text that others begin."""


class _ByteLevelDecoder(TableDecoder):
    def __init__(self, table: TokenTable) -> None:
        super().__init__(table)
        self._size = len(table.tokens)
        self._all = [token or b"" for token in table.tokens]
        self._shown = self._all.copy()
        for token_id in table.special_ids:
            self._shown[token_id] = b""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        tokens, size = self._shown if skip_special_tokens else self._all, self._size
        # A model may have more ids than its tokenizer; they have no text.
        return b"".join([tokens[token_id] for token_id in token_ids if token_id < size]).decode(errors="replace")

    def _decode_within(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)


class _ByteFallbackDecoder(TableDecoder):
    def __init__(self, table: TokenTable) -> None:
        super().__init__(table)
        byte_ids = frozenset(table.byte_ids)
        #: Text, or a single byte; None has neither.
        self._all: list[str | bytes | None] = [
            token if token is None or token_id in byte_ids else token.decode()
            for token_id, token in enumerate(table.tokens)
        ]
        self._shown = [None if token_id in self._special_ids else token for token_id, token in enumerate(self._all)]
        self._stripped, self._max_stripped = table.stripped, table.max_stripped

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self._join(token_ids, self._shown if skip_special_tokens else self._all)
        num_stripped = 0
        while num_stripped < min(self._max_stripped, len(text)) and text[num_stripped] == self._stripped:
            num_stripped += 1
        return text[num_stripped:]

    def _decode_within(self, token_ids: Sequence[int]) -> str:
        return self._join(token_ids, self._shown)

    def _join(self, token_ids: Sequence[int], tokens: Sequence[str | bytes | None]) -> str:
        return "".join(_join_bytes(tokens[token_id] for token_id in token_ids if token_id < len(tokens)))


class _MetaspaceDecoder(TableDecoder):
    def __init__(self, table: TokenTable) -> None:
        super().__init__(table)
        self._marker = table.marker
        self._all = [None if token is None else token.decode() for token in table.tokens]
        self._shown = [None if token_id in self._special_ids else token for token_id, token in enumerate(self._all)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        texts = self._list(token_ids, self._shown if skip_special_tokens else self._all)
        first, others = "".join(texts[:1]), "".join(texts[1:])
        return first.replace(self._marker, "") + others.replace(self._marker, " ")

    def _decode_within(self, token_ids: Sequence[int]) -> str:
        return "".join(self._list(token_ids, self._shown)).replace(self._marker, " ")

    def _list(self, token_ids: Sequence[int], tokens: Sequence[str | None]) -> list[str]:
        found = (tokens[token_id] for token_id in token_ids if token_id < len(tokens))
        return [text for text in found if text is not None]


_DECODERS: Final[Mapping[str, Callable[[TokenTable], TableDecoder]]] = {
    "byte_level": _ByteLevelDecoder,
    "byte_fallback": _ByteFallbackDecoder,
    "metaspace": _MetaspaceDecoder,
}


def _join_bytes(tokens: Iterable[str | bytes | None]) -> Iterator[str]:
    """Yields texts, and those of runs of bytes. If a run is not UTF-8 as a whole, each of its bytes is U+FFFD."""
    run = bytearray()
    for token in tokens:
        if isinstance(token, bytes):
            run += token
        elif token is not None:
            if run:
                yield _decode_run(run)
                run.clear()
            yield token
    if run:
        yield _decode_run(run)


def _decode_run(run: bytearray) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)
