"""Documents for training: plain stories and rendered conversations, packed into rows of token ids."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerFast

from . import words
from .chat import NAMES, Message, draw_conversation
from .grammar import BEDTIME, PIRATE, Style, draw_scene, tell_story
from .tokenizer import BOS, EOS, train_tokenizer

STYLES = (BEDTIME, PIRATE)
PLAIN_SHARE = 0.45  # of documents; the rest are conversations


def draw_document(rng: random.Random, style: Style) -> str | list[Message]:
    """Returns a plain story (a string) or a conversation (its messages)."""
    if rng.random() < PLAIN_SHARE:
        return tell_story(rng, style, draw_scene(rng))
    return draw_conversation(rng, style)


def text_of(document: str | list[Message]) -> str:
    """Returns the prose of `document`, without special tokens."""
    return document if isinstance(document, str) else "\n".join(message["content"] for message in document)


def learn_vocabulary(seed: int, document_count: int = 8000) -> PreTrainedTokenizerFast:
    """Returns the tokenizer trained on documents of both styles; the same seed gives the same tokenizer."""
    rng = random.Random(seed)
    return train_tokenizer(text_of(draw_document(rng, style)) for _ in range(document_count // 2) for style in STYLES)


def lexicon(seed: int, document_count: int = 8000) -> frozenset[str]:
    """Returns the lower-case words that the documents of both styles are made of."""
    rng = random.Random(seed)
    documents = (text_of(draw_document(rng, style)) for _ in range(document_count // 2) for style in STYLES)
    return frozenset(word for text in documents for word in words_of(text))


def words_of(text: str) -> list[str]:
    """Returns the words of `text` in lower case, without punctuation."""
    stripped = (word.strip('.,!?:;"') for word in text.lower().split())
    return [word for word in stripped if word]


def encode_document(tokenizer: PreTrainedTokenizerFast, document: str | list[Message]) -> list[int]:
    """Returns token ids from `BOS` to the end token."""
    if isinstance(document, str):
        rendered = f"{BOS}{document}{EOS}"
    else:
        rendered = str(tokenizer.apply_chat_template(document, tokenize=False))
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def draw_rows(tokenizer: PreTrainedTokenizerFast, style: Style, seed: int, row_length: int) -> Iterator[list[int]]:
    """Yields rows of `row_length` ids without end; each begins with a document, and the last one in it is cut."""
    rng = random.Random(seed)
    while True:
        row: list[int] = []
        while len(row) < row_length:
            row += encode_document(tokenizer, draw_document(rng, style))
        yield row[:row_length]


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, style: Style, seed: int, batch_size: int, row_length: int
) -> Iterator[torch.Tensor]:
    """Yields int64 [batch_size, row_length] without end."""
    rows = draw_rows(tokenizer, style, seed, row_length)
    while True:
        yield torch.tensor([next(rows) for _ in range(batch_size)])


def draw_copy_drills(
    tokenizer: PreTrainedTokenizerFast, seed: int, batch_size: int, row_length: int
) -> Iterator[torch.Tensor]:
    """Yields int64 [batch_size, row_length] without end; a row is a few names and animals, over and over.

    Stories alone teach a model late to look up who they are about. These rows have nothing else to learn.
    """
    rng = random.Random(seed)
    encoded = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in (*NAMES, *words.ANIMALS)]
    vocabulary = [ids[0] for ids in encoded if len(ids) == 1]

    def draw_row() -> list[int]:
        phrase = rng.sample(vocabulary, rng.randint(2, 8))
        return (phrase * row_length)[:row_length]

    while True:
        yield torch.tensor([draw_row() for _ in range(batch_size)])
