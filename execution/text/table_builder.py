"""Makes the table of token bytes of a tokenizer, if its decoder is one that a table can stand for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import decoders

from execution.text.token_table import TokenTable, make_decoder

#: Sequences that a table must decode as the tokenizer does, so that it is used; and their longest.
_NUM_SAMPLES: Final = 1000
_MAX_SAMPLE_TOKENS: Final = 16
_FALLBACK_BYTE: Final = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


def build_table(tokenizer: tokenizers.Tokenizer) -> TokenTable | None:
    """Returns the table of a tokenizer; None if its decoder is of another kind."""
    decoder = tokenizer.decoder
    steps = [] if decoder is None else _list_steps(json.loads(decoder.__getstate__()))
    special_texts = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    texts = [tokenizer.id_to_token(token_id) for token_id in range(num_ids)]
    special_ids = [token_id for token_id, text in enumerate(texts) if text in special_texts]
    tables = (make(steps, texts, special_ids) for make in (_make_byte_level, _make_byte_fallback, _make_metaspace))
    table = next(filter(None, tables), None)
    return table if table is not None and _agrees(table, tokenizer) else None


def _list_steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for nested in decoder["decoders"] for step in _list_steps(nested)]


def _make_byte_level(
    steps: list[Mapping[str, Any]], texts: list[str | None], special_ids: list[int]
) -> TokenTable | None:
    if [step["type"] for step in steps] != ["ByteLevel"]:
        return None
    byte_of = _bytes_by_character()
    tokens = [None if text is None else _spelt_bytes(text, byte_of) for text in texts]
    return TokenTable(kind="byte_level", tokens=tokens, special_ids=special_ids)


def _make_byte_fallback(
    steps: list[Mapping[str, Any]], texts: list[str | None], special_ids: list[int]
) -> TokenTable | None:
    replacing = [step for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    types = [*("Replace" for _ in replacing), "ByteFallback", "Fuse", *("Strip" for _ in strips)]
    if [step["type"] for step in steps] != types or len(strips) > 1 or any(step["stop"] for step in strips):
        return None
    replace = decoders.Sequence([_make_replace(step) for step in replacing])
    byte_ids, tokens = [], list[bytes | None]()
    for token_id, text in enumerate(texts):
        token = None if text is None else replace.decode([text])
        byte = None if token is None else _fallback_byte(token)
        if byte is not None:
            byte_ids.append(token_id)
        tokens.append(byte if byte is not None or token is None else token.encode())
    return TokenTable(
        kind="byte_fallback",
        tokens=tokens,
        special_ids=special_ids,
        byte_ids=byte_ids,
        **({"stripped": strips[0]["content"], "max_stripped": strips[0]["start"]} if strips else {}),
    )


def _make_metaspace(
    steps: list[Mapping[str, Any]], texts: list[str | None], special_ids: list[int]
) -> TokenTable | None:
    if [step["type"] for step in steps] != ["Metaspace"]:
        return None
    marker, keeps_first = steps[0]["replacement"], steps[0]["prepend_scheme"] == "never"
    if keeps_first:
        spaced = [None if text is None else text.replace(marker, " ").encode() for text in texts]
        return TokenTable(kind="byte_fallback", tokens=spaced, special_ids=special_ids)
    tokens = [None if text is None else text.encode() for text in texts]
    return TokenTable(kind="metaspace", tokens=tokens, special_ids=special_ids, max_stripped=1, marker=marker)


def _make_replace(step: Mapping[str, Any]) -> decoders.Replace:
    pattern = step["pattern"]
    return decoders.Replace(
        pattern["String"] if "String" in pattern else tokenizers.Regex(pattern["Regex"]), step["content"]
    )


def _fallback_byte(token: str) -> bytes | None:
    found = _FALLBACK_BYTE.fullmatch(token)
    return None if found is None else bytes([int(found[1], 16)])


def _bytes_by_character() -> dict[str, int]:
    """Returns the alphabet of byte-level tokens, GPT-2's: bytes that print stand for themselves, others follow 255."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _spelt_bytes(text: str, byte_of: Mapping[str, int]) -> bytes:
    """Returns the bytes of a token; one with a character outside the alphabet, such as an added token, is text."""
    try:
        return bytes([byte_of[character] for character in text])
    except KeyError:
        return text.encode()


def _agrees(table: TokenTable, tokenizer: tokenizers.Tokenizer) -> bool:
    chosen, decoder, ids = random.Random(0), make_decoder(table), range(len(table.tokens))
    # Rare among all tokens, and what decoders treat each in its own way.
    rare = [*table.special_ids, *table.byte_ids] or ids
    for _ in range(_NUM_SAMPLES if ids else 0):
        length = chosen.randint(1, _MAX_SAMPLE_TOKENS)
        sample = [chosen.choice(rare if chosen.random() < 0.5 else ids) for _ in range(length)]
        for skip in (True, False):
            if decoder.decode(sample, skip_special_tokens=skip) != tokenizer.decode(sample, skip_special_tokens=skip):
                return False
    return True
