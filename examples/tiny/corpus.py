"""Documents for training: plain stories and rendered conversations, packed into rows of token ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedTokenizerFast

from .chat import NAMES, Message, draw_conversation, draw_story_exchanges, messages_of
from .grammar import BEDTIME, PIRATE, Style, draw_scene, tell_story
from .texts import facts, words
from .tokenizer import BOS, EOS, train_tokenizer
from .tools import ToolChat, draw_single_call, draw_tool_chat

SEED = 20  # of everything that is shipped
STYLES = (BEDTIME, PIRATE)
STORY_SHARE = 0.45  # of documents; the rest are conversations
TOOL_SHARE = 0.85  # of documents for the model that calls tools

Document = str | list[Message] | ToolChat
Draw = Callable[[random.Random, Style], Document]


def draw_document(rng: random.Random, style: Style) -> str | list[Message]:
    """Returns a story or a conversation."""
    return tell_story(rng, style, draw_scene(rng)) if rng.random() < STORY_SHARE else draw_conversation(rng, style)


def draw_request(rng: random.Random, style: Style) -> Document:
    """Returns a request for a story, and the story."""
    return messages_of(draw_story_exchanges(rng, style)[:1])


def draw_call(rng: random.Random, _: Style) -> Document:
    """Returns a chat with one tool and one call of it."""
    return draw_single_call(rng)


def draw_with_tools(rng: random.Random, style: Style) -> Document:
    """Returns a chat with tools or, more seldom, another document."""
    return draw_tool_chat(rng) if rng.random() < TOOL_SHARE else draw_document(rng, style)


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


def encode_document(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    """Returns token ids from `BOS` to the end token."""
    if isinstance(document, str):
        rendered = f"{BOS}{document}{EOS}"
    elif isinstance(document, ToolChat):
        rendered = str(tokenizer.apply_chat_template(document.messages, tools=document.tools, tokenize=False))
    else:
        rendered = str(tokenizer.apply_chat_template(document, tokenize=False))
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, draw: Draw, style: Style, *, seed: int, batch_size: int, row_length: int
) -> Iterator[torch.Tensor]:
    """Yields int64 [batch_size, row_length] without end; each row begins with a document, and its last one is cut."""
    rng = random.Random(seed)

    def draw_row() -> list[int]:
        row: list[int] = []
        while len(row) < row_length:
            row += encode_document(tokenizer, draw(rng, style))
        return row[:row_length]

    while True:
        yield torch.tensor([draw_row() for _ in range(batch_size)])


def content_emphasis(tokenizer: PreTrainedTokenizerFast, factor: float) -> torch.Tensor:
    """Returns f32 [vocab] loss weights: `factor` for words that a text must keep to (names, kinds, things), else 1.

    They are one token in eight, and the grammar of a story is right without them: a model that is not pressed learns
    last to look up who and what it is about.
    """
    weights = torch.ones(len(tokenizer))
    phrases = (*NAMES, *words.animals, *words.people, *words.things, *words.foods, *facts.animal_facts, *facts.numbers)
    sounds = (sound for sound, _, _, _ in facts.animal_facts.values())
    for phrase in (*phrases, *sounds):
        weights[tokenizer.encode(f" {phrase}", add_special_tokens=False)] = factor
    return weights
