"""Checks options that a caller gives by name: what a client does not know, it must not drop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

#: Names that other clients have for our options: those of OpenAI, transformers and vLLM.
_FOREIGN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "max_output_tokens": "max_new_tokens",
        "max_length": "max_new_tokens",
        "n": "num_sequences",
        "num_return_sequences": "num_sequences",
        "stop": "stop_strings",
        "stop_sequences": "stop_strings",
        "eos_token_id": "stop_token_ids",
        "top_logprobs": "logprobs",
        "random_seed": "seed",
        "timeout": "timeout_s",
    }
)
#: Of a slip of the keyboard; other words that are as much alike mean something else.
_LIKENESS: Final = 0.8


def check_options(given: Iterable[str], kind: type, *others: str) -> None:
    """Raises TypeError for a name that neither the TypedDict `kind` nor the caller itself has, in `others`."""
    known = (*kind.__annotations__, *others)
    for name in given:
        if name not in known:
            foreign = _FOREIGN.get(name)
            meant = [foreign] if foreign in known else get_close_matches(name, known, 1, _LIKENESS)
            suggestion = f"did you mean {meant[0]!r}?" if meant else f"accepted: {', '.join(known)}"
            raise TypeError(f"there is no option {name!r}; {suggestion}")
