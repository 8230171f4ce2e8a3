"""Tokens with a meaning: what a checkpoint's JSON says about begin, end and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bundle.manifest import Tokens
from compiler_svc.models.attributes import AttributeReader

TOKEN_ID_NAMES: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any], vocab_size: int) -> Tokens:
    """Reads the ids of `generation_config.json`, or of `config.json` where it does not say.

    The padding token defaults to the first end token, then to 0: padding never reaches the KV cache.
    """
    said = {name: config[name] for name in TOKEN_ID_NAMES if config.get(name) is not None}
    said |= {name: generation_config[name] for name in TOKEN_ID_NAMES if generation_config.get(name) is not None}
    reader = AttributeReader(said)
    bos, eos, pad = (_read_ids(reader, name, vocab_size) for name in TOKEN_ID_NAMES)
    reader.finish()
    return Tokens(
        vocab_size=vocab_size, bos=bos[0] if bos else None, eos=eos, pad=pad[0] if pad else eos[0] if eos else 0
    )


def _read_ids(reader: AttributeReader, name: str, vocab_size: int) -> tuple[int, ...]:
    value = reader.values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    # Some checkpoints say -1 if there is no padding token.
    ids = [token for token in ids if token != -1]
    if all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in ids):
        return tuple(ids)
    reader.note_invalid(name, value, f"token ids from 0 to {vocab_size - 1}")
    return ()
