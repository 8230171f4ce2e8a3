"""Tokens with a meaning: what a checkpoint's JSON says about begin, end and padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bundle.manifest import Tokens
from compiler_svc.models.attributes import AttributeReader

TOKEN_ID_NAMES: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_PAD: Final = TOKEN_ID_NAMES[2]
#: Names of the files in warnings, the first of which counts before the other.
_GENERATION: Final = "generation_config"
_MODEL: Final = "config"


def read_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any], vocab_size: int) -> Tokens:
    """Reads the ids of `generation_config.json`, or of `config.json` where it does not say.

    Ids beyond the vocabulary are left out: they can be drawn and fed as little as for transformers. That of
    `config.json`'s padding is refused, because transformers makes no model with it. The padding token defaults to the
    first end token, then to 0: padding never reaches the KV cache.
    """
    reader = AttributeReader(config)
    ids: dict[str, tuple[int, ...]] = {}
    for name, file, said in _list_said(config, generation_config, vocab_size):
        is_kept = name == _PAD and file == _MODEL
        kept = [one for one in said if is_kept or not _is_beyond(one, vocab_size)]
        if all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocab_size for one in kept):
            ids[name] = tuple(kept)
        else:
            values = config if file == _MODEL else generation_config
            reader.note_invalid(name, values[name], f"token ids from 0 to {vocab_size - 1}")
    reader.finish()
    bos, eos, pad = (ids.get(name, ()) for name in TOKEN_ID_NAMES)
    return Tokens(
        vocab_size=vocab_size, bos=bos[0] if bos else None, eos=eos, pad=pad[0] if pad else eos[0] if eos else 0
    )


def warn_of_ids_beyond(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], vocab_size: int
) -> Iterator[str]:
    """Names the ids that are left out, because the model has no such tokens."""
    for name, file, said in _list_said(config, generation_config, vocab_size):
        if beyond := [one for one in said if _is_beyond(one, vocab_size)]:
            yield (
                f"{file}.{name}: {', '.join(map(str, beyond))} left out, because the model's tokens end at "
                f"{vocab_size - 1}, so that it neither makes nor takes others"
            )


def _list_said(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], vocab_size: int
) -> Iterator[tuple[str, str, list[Any]]]:
    """The ids that count, by name and file. Some checkpoints say -1 if there is no padding token."""
    for name in TOKEN_ID_NAMES:
        for file, values in ((_GENERATION, generation_config), (_MODEL, config)):
            value = values.get(name)
            if value is None:
                continue
            said = [one for one in (value if isinstance(value, list) else [value]) if one != -1]
            yield name, file, said
            # A padding token that is left out says nothing; an end token says that no other ends the text.
            if name != _PAD or not said or not all(_is_beyond(one, vocab_size) for one in said):
                break


def _is_beyond(token: object, vocab_size: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= vocab_size
