"""Builds convert sentencepiece models and vocabularies with merges, and say what they cannot convert."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from gguf import GGMLQuantizationType
from sentencepiece import sentencepiece_model_pb2
from transformers import (
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from bundle.manifest import Tokens
from compiler_svc.builds.tokenizer_stage import convert_tokenizer
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.directory import MAX_TEXT_BYTES
from compiler_svc.weights.errors import CheckpointInvalid
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.text.handle import TextLimits
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.random_weights import write_checkpoint
from tests.checkpoints.tokenizer_sources import train_byte_level, train_sentencepiece, write_byte_level
from tests.repository import ROOT

TEXTS = (
    "Hello, world!",
    "",
    " ",
    " one space, then  two,   three ",
    "\n\n\tlines\r\nand\x0btabs\x00",
    "Füße, çà et là; é e\u0301 \u200b\u00a0\ufeff",
    "你好，世界 🙂 👩‍👩‍👧 \U0001f9ff \ue000 \u0d9e",
    "<s>a</s> <bos><eos> <unk> <|endoftext|>x",
    "<0x41><0xFF> ▁▁under▁score",
    "a" * 300,
    "1234567890" * 7,
)
TOKENS = Tokens(vocab_size=1000, bos=1, eos=(2,), pad=0)
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
GEMMA = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without a tokenizer."""
    path = write_checkpoint(tmp_path / "models/tiny")
    (path / "tokenizer.json").unlink()
    return path


@pytest.fixture(scope="module")
def forkserver() -> Iterator[Forkserver]:
    module = "compiler_svc.builds.tokenizer_converter"
    with closing(Forkserver("kiln-convert", Call("importlib:import_module", (module,)))) as started:
        yield started


Convert = Callable[..., tuple[tokenizers.Tokenizer, tuple[str, ...]]]


@pytest.fixture
def convert(model: Path, tmp_path: Path, forkserver: Forkserver) -> Convert:
    def run(limits: TextLimits | None = None) -> tuple[tokenizers.Tokenizer, tuple[str, ...]]:
        directory = tmp_path / f"work{random.random()}"
        directory.mkdir()
        checkpoint, warnings = convert_tokenizer(Checkpoint.open(model), TOKENS, directory, forkserver, limits)
        (file,) = (file for file in checkpoint.tokenizer_files if file.name == "tokenizer.json")
        assert [one.name for one in checkpoint.tokenizer_files] == sorted(
            one.name for one in checkpoint.tokenizer_files
        )
        return tokenizers.Tokenizer.from_file(str(file)), warnings

    return run


def write_config(model: Path, model_type: str, tokenizer_config: dict[str, Any] | None) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": model_type, "architectures": None}))
    if tokenizer_config is not None:
        (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def write_model(model: Path, data: bytes, model_type: str, tokenizer_config: dict[str, Any] | None) -> None:
    (model / "tokenizer.model").write_bytes(data)
    write_config(model, model_type, tokenizer_config)


def list_differences(tokenizer: tokenizers.Tokenizer, reference: Any) -> list[str]:
    """Texts that a tokenizer of transformers tokenizes otherwise, or whose tokens it decodes otherwise."""
    differing = []
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            expected = reference.encode(text, add_special_tokens=special)
            decoded = tokenizer.decode(ids, skip_special_tokens=special)
            if ids != expected or decoded != reference.decode(ids, skip_special_tokens=special):
                differing.append(text)
    return differing


def mark_slow(*cases: Any) -> Iterator[Any]:
    """Marks what another case of `make test` stands for."""
    for case in cases:
        yield pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


@pytest.mark.parametrize("model_type", ["llama", *mark_slow("mistral", "phi3", "qwen2")])
@pytest.mark.parametrize("tokenizer_config", [LLAMA, LLAMA | {"add_eos_token": True, "legacy": True}])
def test_a_llama_tokenizer(model: Path, convert: Convert, model_type: str, tokenizer_config: dict[str, Any]) -> None:
    write_model(model, train_sentencepiece("llama"), model_type, tokenizer_config)
    tokenizer, warnings = convert()
    reference = LlamaTokenizer.from_pretrained(model)
    assert list_differences(tokenizer, reference) == []
    assert tokenizer.encode("a").ids[0] == 1
    assert (tokenizer.encode("a").ids[-1] == 2) == tokenizer_config["add_eos_token"]
    (warning,) = warnings
    assert "LlamaTokenizer of transformers" in warning
    assert "' one space before' otherwise than sentencepiece" in warning


def test_a_normalization_is_spelled_as_sentencepiece_does_or_refused(model: Path, convert: Convert) -> None:
    """Whether a class of transformers reads it depends on its release."""
    source = train_sentencepiece("unigram, normalized")
    write_model(model, source, "llama", None)
    reference = sentencepiece.SentencePieceProcessor(model_proto=source)
    text = "Hello, world!"
    read = [each.from_pretrained(model) for each in (LlamaTokenizer, PreTrainedTokenizerFast)]
    if any(one.encode(text, add_special_tokens=False) == reference.encode(text) for one in read):
        tokenizer, _ = convert()
        for normalized in (text, "Füße, 你好 🙂"):
            assert tokenizer.encode(normalized, add_special_tokens=False).ids == reference.encode(normalized)
    else:
        assert f"TokenizersBackend spells {text!r} otherwise" in refuse(convert).violations[0].value


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram"])
def test_a_tokenizer_model_alone(model: Path, convert: Convert, kind: str) -> None:
    write_model(model, train_sentencepiece(kind), "mistral", None)
    tokenizer, warnings = convert()
    reference = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(kind))
    for text in ("Hello, world!", "Füße, 你好 🙂\n\n  x", "a" * 300):
        assert tokenizer.encode(text).ids == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert any("does not say add_bos_token" in warning for warning in warnings)


@pytest.mark.parametrize("model_type", ["gemma2", *mark_slow("gemma3_text", "llama")])
def test_a_gemma_tokenizer(model: Path, convert: Convert, model_type: str) -> None:
    write_model(model, train_sentencepiece("gemma"), model_type, GEMMA)
    tokenizer, warnings = convert()
    assert list_differences(tokenizer, GemmaTokenizer.from_pretrained(model)) == []
    assert tokenizer.encode("a").ids[0] == 2
    assert warnings == ()


@pytest.mark.parametrize(
    ("model_type", "reference", "options"),
    [
        ("gpt2", GPT2Tokenizer, {}),
        ("opt", GPT2Tokenizer, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}),
        *mark_slow(
            ("gptj", GPT2Tokenizer, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}),
            ("starcoder2", GPT2Tokenizer, {"add_prefix_space": True}),
            ("gpt_neox", GPTNeoXTokenizer, {"tokenizer_class": "GPTNeoXTokenizer"}),
            ("qwen2", Qwen2Tokenizer, {"tokenizer_class": "Qwen2Tokenizer"}),
            ("granite", GPT2Tokenizer, {"unk_token": "<|endoftext|>"}),
            ("llama", GPT2Tokenizer, {"tokenizer_class": "GPT2TokenizerFast"}),
        ),
    ],
)
def test_a_vocabulary_with_merges(
    model: Path, convert: Convert, model_type: str, reference: Any, options: dict[str, Any]
) -> None:
    end = "<|endoftext|>"
    write_byte_level(model, end)
    write_config(model, model_type, {"bos_token": end, "eos_token": end} | options)
    tokenizer, warnings = convert()
    assert list_differences(tokenizer, reference.from_pretrained(model)) == []
    assert (tokenizer.encode("a").ids[0] == 0) == options.get("add_bos_token", False)
    trained = train_byte_level(end).get_vocab()
    assert {token: tokenizer.token_to_id(token) for token in trained} == trained
    assert warnings == ()


def test_added_tokens_and_equal_bytes(model: Path, convert: Convert) -> None:
    write_model(model, train_sentencepiece("llama"), "llama", LLAMA | {"pad_token": "<pad>"})
    size = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece("llama")).get_piece_size()
    (model / "added_tokens.json").write_text(json.dumps({"<|tool|>": size, "<pad>": size + 1}))
    first, second = (convert()[0] for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.encode("x<|tool|>").ids[-1] == size
    assert list_differences(first, LlamaTokenizer.from_pretrained(model)) == []


def test_a_checkpoint_without_a_tokenizer_or_with_one_stays(
    model: Path, tmp_path: Path, forkserver: Forkserver
) -> None:
    for content in (None, train_byte_level("<s>").to_str()):
        if content is not None:
            (model / "tokenizer.json").write_text(content)
            (model / "tokenizer.model").write_bytes(b"")
        checkpoint = Checkpoint.open(model)
        assert convert_tokenizer(checkpoint, TOKENS, tmp_path, forkserver) == (checkpoint, ())


def refuse(convert: Convert, limits: TextLimits | None = None) -> CheckpointInvalid:
    with pytest.raises(CheckpointInvalid) as caught:
        convert(limits)
    return caught.value


TIKTOKEN = b"".join(base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256))


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"", "no sentencepiece model"),
        (b"\xff" * 1000, "no sentencepiece model"),
        (random.Random(1).randbytes(20_000), "no sentencepiece model"),
        (train_sentencepiece("llama")[:3000], "no sentencepiece model"),
        (TIKTOKEN, "no sentencepiece model"),
        # A piece that claims a gigabyte.
        (b"\x0a\xff\xff\xff\xff\x03abc", "no sentencepiece model"),
        (train_sentencepiece("words"), "of kind WORD"),
        (train_sentencepiece("characters"), "of kind CHAR"),
    ],
    ids=["empty", "ones", "random", "truncated", "tiktoken", "claims", "words", "characters"],
)
def test_what_is_no_convertible_model_is_refused(model: Path, convert: Convert, data: bytes, detail: str) -> None:
    write_model(model, data, "llama", None)
    error = refuse(convert)
    assert error.subject == "tokenizer.model"
    (violation,) = error.violations
    assert detail in violation.value
    assert "tokenizer.json" in violation.accepted


@pytest.mark.parametrize(
    ("name", "content", "detail"),
    [
        ("vocab.json", "{", "no JSON object"),
        ("vocab.json", '{"a": "b"}', "no JSON object"),
        ("vocab.json", '{"a": 0, "b": 1}', "cannot read it"),
        ("merges.txt", "one two three four\n" * 3, "cannot read it"),
        ("merges.txt", "not there\n", "cannot read it"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(
    model: Path, convert: Convert, name: str, content: str, detail: str
) -> None:
    write_byte_level(model, "<|endoftext|>")
    (model / name).write_text(content)
    write_config(model, "gpt2", None)
    error = refuse(convert)
    assert "vocab.json" in error.subject
    assert detail in error.violations[0].value


def test_code_of_a_checkpoint_does_not_run(model: Path, convert: Convert, tmp_path: Path) -> None:
    (model / "tokenizer.model").write_bytes(train_sentencepiece("llama"))
    (model / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    write_config(
        model, "llama", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    )
    tokenizer, _ = convert()
    assert tokenizer.encode("Hello").ids
    assert not (tmp_path / "ran").exists()


def test_a_file_of_a_gigabyte_is_refused_before_it_is_read(model: Path) -> None:
    with (model / "tokenizer.model").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointInvalid, match=f"at most {MAX_TEXT_BYTES} bytes"):
        Checkpoint.open(model)


def add_pieces(count: int) -> bytes:
    """A model with so many pieces more."""
    model = sentencepiece_model_pb2.ModelProto.FromString(train_sentencepiece("llama"))
    for number in range(count):
        model.pieces.add(piece=f"piece{number}", score=-1000.0 - number, type=1)
    return bytes(model.SerializeToString())


def test_a_conversion_that_reaches_a_limit_is_refused(model: Path, convert: Convert) -> None:
    write_model(model, add_pieces(600_000), "llama", LLAMA)
    error = refuse(convert, TextLimits(load_timeout_s=1.0))
    assert "took more than 1 s of processor time" in error.violations[0].value
    error = refuse(convert, TextLimits(max_memory_bytes=30 << 20))
    value = error.violations[0].value
    assert "took more than 30 MiB of memory" in value or "the library that reads it ended with SIGABRT" in value


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_vocabularies_of_gguf_files_spell_as_transformers_reads_them(
    name: str, model: Path, tmp_path: Path, forkserver: Forkserver
) -> None:
    if name == "byte-level":
        file = write_gguf(ROOT / "examples/models/kiln-tiny", tmp_path / "a.gguf", GGMLQuantizationType.F32)
    else:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece("llama"))
        file = write_gguf(model, tmp_path / "a.gguf", GGMLQuantizationType.F32, pieces=pieces)
    converted, warnings = convert_tokenizer(Checkpoint.open(file), TOKENS, tmp_path, forkserver)
    assert not warnings
    made = {one.name: one for one in converted.tokenizer_files}
    assert {"tokenizer.json"} <= made.keys() <= {"tokenizer.json", "tokenizer_config.json"}
    tokenizer = tokenizers.Tokenizer.from_file(str(made["tokenizer.json"]))
    assert tokenizer.encode("Hello").ids[0] == 1
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=file.name)
    assert list_differences(tokenizer, reference) == []


def test_a_vocabulary_of_another_kind_is_refused(model: Path, tmp_path: Path, forkserver: Forkserver) -> None:
    file = write_gguf(ROOT / "examples/models/kiln-tiny", tmp_path / "a.gguf", GGMLQuantizationType.F32, vocab="bert")
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.ggml: got .*'bert'.*accepted: a vocabulary of byte-level"):
        convert_tokenizer(Checkpoint.open(file), TOKENS, tmp_path, forkserver)
