"""The forms in which checkpoints keep a tokenizer, apart from `tokenizer.json`, which bundles need."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Final

from compiler_svc.weights.checkpoint import Checkpoint

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"

#: Distributions whose versions determine what a build makes of a tokenizer.
_CONVERTERS: Final = ("sentencepiece", "tokenizers", "transformers")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Files from which a build makes a `tokenizer.json`; a checkpoint must have all of these names."""

    kind: str
    files: tuple[str, ...]


SENTENCEPIECE: Final = TokenizerSource("sentencepiece", ("tokenizer.model",))
#: The vocabulary of a GGUF file, whatever its name.
GGUF: Final = TokenizerSource("GGUF", ("model.gguf",))
BYTE_LEVEL: Final = TokenizerSource("byte-level BPE", ("vocab.json", "merges.txt"))
SOURCES: Final = (SENTENCEPIECE, BYTE_LEVEL)


def has_tokenizer_file(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a `tokenizer.json`."""
    return TOKENIZER_FILE in _list_names(checkpoint)


def find_source(checkpoint: Checkpoint) -> TokenizerSource | None:
    """The files that a build converts; None if there is a `tokenizer.json`, or nothing that a build can convert."""
    if has_tokenizer_file(checkpoint):
        return None
    if checkpoint.is_gguf:
        return GGUF if checkpoint.tokenizer_files else None
    names = _list_names(checkpoint)
    return next((source for source in SOURCES if names.issuperset(source.files)), None)


def find_incomplete_source(checkpoint: Checkpoint) -> TokenizerSource | None:
    """The form of which a checkpoint without any whole tokenizer has some files, and lacks others; None otherwise."""
    if has_tokenizer_file(checkpoint) or find_source(checkpoint) is not None or checkpoint.is_gguf:
        return None
    names = _list_names(checkpoint)
    return next((source for source in SOURCES if not names.isdisjoint(source.files)), None)


def read_converter_versions() -> dict[str, str]:
    """Versions of all that determines the bytes of a bundle's tokenizer, by distribution."""
    return {name: metadata.version(name) for name in _CONVERTERS}


def _list_names(checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset(file.name for file in checkpoint.tokenizer_files)
