"""Small tokenizers of the kinds that checkpoints come with."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["Once upon a time there was a small grey cat.", "Füße, çà et là; 你好，世界 🙂 👩‍👩‍👧"] * 4


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
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
