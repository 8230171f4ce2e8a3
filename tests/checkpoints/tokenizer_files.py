"""Small tokenizers of the kinds that checkpoints come with."""

from __future__ import annotations

import json
from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

_SPECIAL: Final = ["<pad>", "<s>", "</s>", "<unk>"]
CORPUS = ["Once upon a time there was a small grey cat.", "Füße, çà et là; 你好，世界 🙂 👩‍👩‍👧"] * 4

_CODE: Final = ["def add(café, naïve):\n    return café  +  naïve"] * 4


def byte_level(vocab_size: int = 320) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2 and Llama 3 have; it puts <s> before a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2 has; its decoder strips a text's first space."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeilnotuw.", "▁a", "▁on", "é"]:
        vocab[token] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """BPE with a mark for spaces, which its decoder takes off the first token of a text; no token has two."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator([*CORPUS, *_CODE], _make_trainer())
    return tokenizer


def trained_byte_fallback() -> tokenizers.Tokenizer:
    """BPE with byte fallback, whose tokens may have several spaces; its decoder strips a text's first one."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator([*CORPUS, *_CODE], _make_trainer())
    model = json.loads(tokenizer.to_str())["model"]
    for byte in range(256):
        model["vocab"][f"<0x{byte:02X}>"] = len(model["vocab"])
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer.model = models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer.decoder = byte_fallback().decoder
    return tokenizer


def _make_trainer() -> trainers.BpeTrainer:
    printed = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    return trainers.BpeTrainer(vocab_size=400, initial_alphabet=printed, special_tokens=_SPECIAL, show_progress=False)
