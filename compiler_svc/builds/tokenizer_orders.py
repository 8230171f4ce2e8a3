"""What a build asks of the process that makes a tokenizer, and what that answers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from execution.text.control import Load


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What both orders have.

    Attributes:
        directory: Holds the tokenizer's files and `config.json`, and nothing else; the process may write there.
        load: The files as a runtime reads them.
        vocab_size: Rows of the model's embeddings.
    """

    directory: Path
    load: Load
    vocab_size: int


class Conversion(_Order, frozen=True):
    """Make the `tokenizer.json`, which the checkpoint has not, from the files of a kind of source.

    `classes` are those of transformers that the family's checkpoints have.
    """

    kind: str
    classes: tuple[str, ...]


class Comparison(_Order, frozen=True):
    """Compare the tokenizer that a runtime reads with the one that transformers makes of the same files."""


class Made(msgspec.Struct, frozen=True, tag=True):
    """Files, by name, that a bundle gets beside or in place of the checkpoint's, and warnings."""

    files: dict[str, bytes]
    warnings: tuple[str, ...]


class NotMade(msgspec.Struct, frozen=True, tag=True):
    """Why a bundle would have no right tokenizer: the file, what is wrong with it, and what would be accepted."""

    file: str
    detail: str
    accepted: str


class OutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """That the process needed more memory than it may take."""


Order = Conversion | Comparison
Answer = Made | NotMade | OutOfMemory
