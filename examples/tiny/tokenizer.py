"""The byte-level BPE tokenizer that all models share, and its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
MAX_LENGTH = 1024
PAD, BOS, EOS, END_OF_TURN = "<|pad|>", "<|begin|>", "<|end|>", "<|eot|>"
ASSISTANT = "<|assistant|>"
ROLES = ("<|system|>", "<|user|>", ASSISTANT)
SPECIAL_TOKENS = (PAD, BOS, EOS, END_OF_TURN, *ROLES)
CHAT_TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")
TOOL_CHAT_TEMPLATE_PATH = Path(__file__).with_name("tool_chat_template.jinja")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of `VOCAB_SIZE` entries learned from `texts`; it puts `BOS` before a plain prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[END_OF_TURN, *ROLES],
        chat_template=CHAT_TEMPLATE_PATH.read_text(),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
