"""For each architecture, a tokenizer of the kind that its published checkpoints have, as data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.checkpoints.tokenizer_sources import CORPUS, train_sentencepiece, write_byte_level

VOCAB_SIZE: Final = 512

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class ByteLevel:
    """A `tokenizer.json` of byte-level BPE.

    Attributes:
        split: Pattern that texts are divided by first; empty for GPT-2's, which ByteLevel has.
        digits: Whether digits stand alone.
        normalizer: Name of a normal form; empty for none.
        special: The first tokens of the vocabulary.
        before, after: What the tokenizer puts around a text.
        added: Tokens behind the vocabulary.
    """

    special: tuple[str, ...]
    split: str = ""
    digits: bool = False
    normalizer: str = ""
    before: str = ""
    after: str = ""
    added: tuple[str, ...] = ()
    tokenizer_config: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        self.make().save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(
            json.dumps(
                {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.special[-1]} | self.tokenizer_config
            )
        )

    def make(self) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        if self.normalizer:
            tokenizer.normalizer = getattr(normalizers, self.normalizer)()
        steps: list[Any] = [pre_tokenizers.Split(Regex(self.split), "isolated")] if self.split else []
        steps += [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.split))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(self.added),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(self.special),
            show_progress=False,
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in self.added])
        around = [token for token in (self.before, self.after) if token]
        if around:
            template = " ".join(part for part in (self.before, "$A", self.after) if part)
            pairs = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)]
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)
        else:
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer


def _sentencepiece(kind: str, **tokenizer_config: Any) -> Callable[[Path], None]:
    """What writes a `tokenizer.model` and its configuration."""

    def write(path: Path) -> None:
        (path / "tokenizer.model").write_bytes(train_sentencepiece(kind))
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))

    return write


def _vocabulary(end: str, **tokenizer_config: Any) -> Callable[[Path], None]:
    """What writes a `vocab.json` with `merges.txt`, and its configuration."""

    def write(path: Path) -> None:
        write_byte_level(path, end)
        named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
        (path / "tokenizer_config.json").write_text(json.dumps(named | tokenizer_config))

    return write


_LLAMA2 = _sentencepiece("llama", tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False)
_GEMMA = _sentencepiece("gemma", tokenizer_class="GemmaTokenizer", add_bos_token=True)
_GPT2 = _vocabulary("<|endoftext|>", tokenizer_class="GPT2Tokenizer")
_CHAT = ("<|im_start|>", "<|im_end|>")

#: What writes the files of a tokenizer, by architecture and form.
FAMILY_TOKENIZERS: Final[dict[str, dict[str, Callable[[Path], None]]]] = {
    "LlamaForCausalLM": {
        "llama-2": _LLAMA2,
        "llama-3": ByteLevel(
            ("<|begin_of_text|>", "<|end_of_text|>"), split=_LLAMA3, before="<|begin_of_text|>", added=("<|eot_id|>",)
        ).write,
    },
    "MistralForCausalLM": {"v0.1": _LLAMA2},
    "Qwen2ForCausalLM": {
        "json": ByteLevel(("<|endoftext|>",), split=QWEN, normalizer="NFC", added=_CHAT).write,
        "vocabulary": _vocabulary("<|endoftext|>", tokenizer_class="Qwen2Tokenizer", bos_token=None),
    },
    "Qwen3ForCausalLM": {"json": ByteLevel(("<|endoftext|>",), split=QWEN, normalizer="NFC", added=_CHAT).write},
    "Phi3ForCausalLM": {"sentencepiece": _LLAMA2},
    "GraniteForCausalLM": {"json": ByteLevel(("<|end_of_text|>",), digits=True).write},
    "Olmo2ForCausalLM": {"json": ByteLevel(("<|endoftext|>",), split=_LLAMA3).write},
    "SmolLM3ForCausalLM": {"json": ByteLevel(("<|end_of_text|>",), split=_LLAMA3, added=_CHAT).write},
    "Gemma2ForCausalLM": {"sentencepiece": _GEMMA},
    "Gemma3ForCausalLM": {"sentencepiece": _GEMMA},
    "Starcoder2ForCausalLM": {"json": ByteLevel(("<|endoftext|>",), digits=True).write, "vocabulary": _GPT2},
    "GPTNeoXForCausalLM": {
        "json": ByteLevel(("<|endoftext|>",), normalizer="NFC", added=("  ", "    ")).write,
        "vocabulary": _vocabulary("<|endoftext|>", tokenizer_class="GPTNeoXTokenizer"),
    },
    "GPT2LMHeadModel": {"json": ByteLevel(("<|endoftext|>",)).write, "vocabulary": _GPT2},
    "OPTForCausalLM": {
        "vocabulary": _vocabulary("</s>", tokenizer_class="GPT2Tokenizer", add_bos_token=True),
        # What its class adds is in tokenizer_config.json, and not in tokenizer.json.
        "json": ByteLevel(("</s>",), tokenizer_config={"bos_token": "</s>", "add_bos_token": True}).write,
    },
    "GPTJForCausalLM": {"vocabulary": _GPT2},
    "BloomForCausalLM": {"json": ByteLevel(("<unk>", "<s>", "</s>", "<pad>"), split=_BLOOM).write},
    "CohereForCausalLM": {
        "json": ByteLevel(
            ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"), digits=True, normalizer="NFC", before="<BOS_TOKEN>"
        ).write
    },
}
