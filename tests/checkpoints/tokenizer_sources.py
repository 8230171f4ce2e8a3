"""Trains small tokenizers in the forms that older checkpoints have: sentencepiece models, vocabularies with merges."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

#: What all of them are trained on.
CORPUS: Final = [
    "Once upon a time there was a small grey cat, and it said: hello, world! No one heard it.",
    "def add(left, right):\n    return left + right  # 1234567890",
    "Füße, çà et là; Привет, мир! 你好，世界 🙂 👩‍👩‍👧",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
] * 8
_PLAIN: Final[dict[str, Any]] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}

#: What sentencepiece is trained with, by name: as Llama 2, Mistral and Phi-3 were, as Gemma was, and otherwise.
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "llama": _PLAIN | {"model_type": "bpe", "split_digits": True},
    "gemma": _PLAIN
    | {
        "model_type": "bpe",
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        "user_defined_symbols": ["<mask>", "<start_of_turn>", "<end_of_turn>", "\n\n", "▁▁"],
    },
    "unigram": _PLAIN | {"model_type": "unigram", "add_dummy_prefix": False},
    "unigram, normalized": {"model_type": "unigram"},
    "words": {"model_type": "word"},
    "characters": {"model_type": "char"},
}


@cache
def train_sentencepiece(kind: str, vocab_size: int = 500) -> bytes:
    """Returns a `tokenizer.model` of a kind of `OPTIONS`."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **OPTIONS[kind],
    )
    return written.getvalue()


@cache
def train_byte_level(end: str, vocab_size: int = 400) -> tokenizers.Tokenizer:
    """Trains byte-level BPE whose first token is `end`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[end],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_byte_level(path: Path, end: str) -> None:
    """Writes `vocab.json` and `merges.txt` as GPT-2's came."""
    model = json.loads(train_byte_level(end).to_str())["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
