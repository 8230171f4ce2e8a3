"""Whatever files say how a checkpoint's tokenizer is, a bundle has the one that transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from bundle.manifest import Tokens
from compiler_svc.builds.text_stage import describe_text
from compiler_svc.builds.tokenizer_stage import convert_tokenizer, follow_transformers
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call
from execution.text.bundle_text import BundleText
from execution.text.handle import TextLimits
from execution.text.prompt import ChatMessage, ChatPrompt
from tests.checkpoints.family_tokenizers import QWEN, ByteLevel
from tests.checkpoints.random_weights import CONFIG, write_checkpoint
from tests.checkpoints.tokenizer_files import byte_level
from tests.checkpoints.tokenizer_sources import CORPUS, train_byte_level, train_sentencepiece, write_byte_level

TEXTS = (
    "Hello, world!",
    "  two spaces, 12345 digits\n\n\tand tabs ",
    "Füße, çà et là; e\u0301 \u200b\u00a0 你好，世界 🙂",
    "a<s>b</s> <|im_start|>user\nhi<|im_end|> <|endoftext|>x<mask> y",
    "x [MASK] [CLS] <tool> <|eot|><pad>",
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ pad_token }}{% endif %}<|im_end|>"
)
TURNS = (("user", "hello"), ("assistant", "world"), ("user", "weather"))


def entry(content: str, *, special: bool = True, lstrip: bool = False) -> dict[str, Any]:
    return {
        "content": content,
        "lstrip": lstrip,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": special,
    }


def added(**named: Any) -> dict[str, Any]:
    """A `tokenizer_config.json` with tokens behind those of `byte_level`, whose vocabulary has 320."""
    known = {str(token_id): entry(text) for token_id, text in enumerate(("<pad>", "<s>", "</s>"))}
    return {
        "added_tokens_decoder": known | {"320": entry("<|im_end|>")},
        "bos_token": "<s>",
        "eos_token": "</s>",
    } | named


def with_ordinary(token: str) -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def of_sentencepiece(kind: str, path: Path) -> tokenizers.Tokenizer:
    (path / "tokenizer.model").write_bytes(train_sentencepiece(kind))
    made = LlamaTokenizer.from_pretrained(path).backend_tokenizer
    (path / "tokenizer.model").unlink()
    return made


def word_piece(path: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


@dataclass(frozen=True)
class Case:
    """A tokenizer's files, and what of them the bundle has otherwise than the checkpoint."""

    tokenizer: Callable[[Path], tokenizers.Tokenizer] | None
    config: dict[str, Any]
    model_type: str = "llama"
    files: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 1000
    changed: tuple[str, ...] = ()
    source: Callable[[Path], object] | None = None


BOTH = ("tokenizer.json", "tokenizer_config.json")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
MAP = {"special_tokens_map.json": NAMED}
QWEN_LIKE = ByteLevel(("<pad>", "<s>", "</s>"), split=QWEN, normalizer="NFC").make()
CASES = {
    "byte level, all said": Case(lambda _: byte_level(), FAST | NAMED),
    "byte level, special_tokens_map": Case(lambda _: byte_level(), FAST, files=MAP, changed=BOTH[1:]),
    "byte level, in the configuration alone": Case(lambda _: byte_level(), FAST | added(), changed=BOTH[:1]),
    "byte level, special by the configuration": Case(
        lambda _: with_ordinary("<|im_end|>"), FAST | added(), changed=BOTH[:1]
    ),
    "byte level, additional special tokens": Case(
        lambda _: with_ordinary("<|im_end|>"),
        FAST | NAMED | {"additional_special_tokens": ["<|im_end|>", "<tool>"]},
        changed=BOTH[:1],
    ),
    "byte level, added_tokens.json": Case(
        lambda _: byte_level(),
        FAST | NAMED | {"pad_token": "<|eot|>"},
        files={"added_tokens.json": {"<|eot|>": 320, "<tool>": 321}},
        changed=BOTH[:1],
    ),
    "byte level, class defaults of GPT-2": Case(
        lambda _: ByteLevel(("<|endoftext|>",)).make(),
        {"tokenizer_class": "GPT2Tokenizer"},
        model_type="gpt2",
        changed=BOTH[1:],
    ),
    "byte level, a default beyond the rows": Case(
        lambda _: QWEN_LIKE,
        {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<pad>"} | NAMED,
        model_type="qwen3",
        vocab_size=QWEN_LIKE.get_vocab_size(),
    ),
    "byte level, no configuration": Case(
        lambda _: train_byte_level("<|endoftext|>"), {}, model_type="gpt2", changed=BOTH
    ),
    "byte fallback": Case(lambda path: of_sentencepiece("llama", path), FAST | NAMED),
    "byte fallback, a mask of the configuration": Case(
        lambda path: of_sentencepiece("llama", path),
        FAST | NAMED | {"mask_token": entry("<mask>", lstrip=True) | {"__type": "AddedToken"}},
        changed=BOTH[:1],
    ),
    "unigram, special_tokens_map": Case(
        lambda path: of_sentencepiece("unigram", path),
        FAST,
        files={"special_tokens_map.json": NAMED | {"pad_token": entry("<mask>")}},
        changed=BOTH,
    ),
    "words": Case(word_piece, FAST | {"eos_token": "[SEP]"}),
    "words, in small letters by the class": Case(
        word_piece, {"tokenizer_class": "BertTokenizer"}, model_type="bert", changed=BOTH
    ),
    "sentencepiece, special_tokens_map": Case(
        None,
        {"tokenizer_class": "LlamaTokenizer"},
        files={"special_tokens_map.json": NAMED | {"pad_token": "<unk>"}},
        source=lambda path: (path / "tokenizer.model").write_bytes(train_sentencepiece("llama")),
        changed=BOTH,
    ),
    "sentencepiece, all said": Case(
        None,
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        source=lambda path: (path / "tokenizer.model").write_bytes(train_sentencepiece("gemma")),
        changed=BOTH[:1],
    ),
    "vocabulary, class defaults": Case(
        None,
        {"tokenizer_class": "GPT2Tokenizer"},
        source=lambda path: write_byte_level(path, "<|endoftext|>"),
        changed=BOTH,
    ),
}


def write(path: Path, case: Case) -> None:
    config = CONFIG | {"model_type": case.model_type}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").unlink()
    if case.tokenizer is not None:
        case.tokenizer(path).save(str(path / "tokenizer.json"))
    if case.source is not None:
        case.source(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    for name, value in ({"tokenizer_config.json": case.config} | case.files).items():
        if value:
            (path / name).write_text(json.dumps(value))


@pytest.fixture(scope="module")
def forkserver() -> Iterator[Forkserver]:
    with closing(Forkserver("kiln-builds", Call("compiler_svc.builds.process:preload"))) as started:
        yield started


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "models/tiny")


Prepare = Callable[..., tuple[Checkpoint, tuple[str, ...]]]


@pytest.fixture
def prepare(model: Path, tmp_path: Path, forkserver: Forkserver) -> Prepare:
    """Converts and compares a checkpoint's tokenizer, as builds do."""

    def run(vocab_size: int = 1000, limits: TextLimits | None = None) -> tuple[Checkpoint, tuple[str, ...]]:
        (tmp_path / "work").mkdir()
        tokens = Tokens(vocab_size=vocab_size, bos=1, eos=(2,), pad=0)
        converted, warnings = convert_tokenizer(Checkpoint.open(model), tokens, tmp_path / "work", forkserver)
        if warnings or "tokenizer.json" not in {file.name for file in Checkpoint.open(model).tokenizer_files}:
            return converted, warnings
        return follow_transformers(converted, tokens, tmp_path / "work", forkserver, limits)

    return run


def make_reference(path: Path, case: Case) -> PreTrainedTokenizerFast:
    if case.source is None:
        return AutoTokenizer.from_pretrained(path)
    # Decision 121: the declared class, of which AutoTokenizer makes another for some types.
    return tokenizer_class_from_name(case.config["tokenizer_class"]).from_pretrained(path)


@pytest.mark.parametrize("name", CASES)
def test_ids_texts_and_chats_are_those_of_transformers(model: Path, prepare: Prepare, name: str) -> None:
    case = CASES[name]
    write(model, case)
    reference = make_reference(model, case)
    checkpoint, warnings = prepare(case.vocab_size)
    text = BundleText.load(describe_text(checkpoint, Tokens(vocab_size=case.vocab_size, bos=1, eos=(2,), pad=0)))

    for one in TEXTS:
        ids = reference.encode(one)
        if max(ids) >= case.vocab_size:
            continue
        assert text.encode_text(one) == ids, one
        assert text.tokenizer.encode(one, add_special_tokens=False) == reference.encode(one, add_special_tokens=False)
        for skips in (True, False):
            shown = reference.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert text.tokenizer.decode(ids, skip_special_tokens=skips) == shown
    for tools in ((), ('{"type": "function", "function": {"name": "weather", "parameters": {}}}',)):
        prompt = ChatPrompt(tuple(ChatMessage(*turn) for turn in TURNS), tools_json=tools)
        rendered = reference.apply_chat_template(
            [{"role": role, "content": content} for role, content in TURNS],
            tools=[json.loads(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text.encode_chat(prompt) == reference.encode(rendered, add_special_tokens=False)

    own = {file.name for file in checkpoint.tokenizer_files if file.parent == model}
    assert {file.name for file in checkpoint.tokenizer_files} - own == set(case.changed), warnings
    if case.source is None:
        assert [warning.partition(":")[0] for warning in warnings] == (
            [", ".join(case.changed)] if case.changed else []
        )


def test_a_warning_names_the_first_difference(model: Path, prepare: Prepare) -> None:
    write(model, CASES["byte level, special by the configuration"])
    _, (warning,) = prepare()
    assert "TokenizersBackend of transformers" in warning
    assert warning.endswith("have the text 'a<|im_end|> b', not 'a b', without special tokens")


def test_tokens_beyond_the_rows_stay_out_of_the_bundle(model: Path, prepare: Prepare) -> None:
    write(model, CASES["byte level, in the configuration alone"])
    beyond = added()["added_tokens_decoder"] | {"321": entry("<tool>")}
    (model / "tokenizer_config.json").write_text(json.dumps(FAST | added(added_tokens_decoder=beyond)))
    checkpoint, _ = prepare(vocab_size=321)
    (file,) = (file for file in checkpoint.tokenizer_files if file.name == "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(str(file))
    assert made.encode("<|im_end|>", add_special_tokens=False).ids == [320]
    assert max(made.encode("<tool>").ids) < 320


def test_code_of_a_checkpoint_does_not_run_and_its_files_stay(model: Path, prepare: Prepare, tmp_path: Path) -> None:
    write(model, CASES["byte level, all said"])
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    config = CONFIG | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (model / "config.json").write_text(json.dumps(config))
    checkpoint, (warning,) = prepare()
    assert {file.parent for file in checkpoint.tokenizer_files} == {model}
    assert "transformers makes no tokenizer of it" in warning
    assert "custom code" in warning
    assert str(tmp_path) not in warning
    assert not (tmp_path / "ran").exists()


def test_what_no_file_can_say_is_refused(model: Path, prepare: Prepare) -> None:
    write(model, CASES["byte level, all said"])
    (model / "tokenizer_config.json").write_text(json.dumps(FAST | NAMED | {"split_special_tokens": True}))
    with pytest.raises(CheckpointInvalid, match=r"does what no tokenizer\.json says: 'a<pad> b'"):
        prepare()


def test_a_comparison_that_reaches_a_limit_leaves_the_files(model: Path, prepare: Prepare) -> None:
    large = models.WordLevel({f"word{number}": number for number in range(100_000)}, unk_token="word0")
    write(model, Case(lambda _: tokenizers.Tokenizer(large), FAST))
    checkpoint, (warning,) = prepare(limits=TextLimits(max_memory_bytes=2 << 20))
    assert {file.parent for file in checkpoint.tokenizer_files} == {model}
    assert "not compared with what transformers makes of it" in warning


def test_a_tokenizer_without_tokens_is_not_compared(model: Path, prepare: Prepare) -> None:
    checkpoint, warnings = prepare()
    assert {file.parent for file in checkpoint.tokenizer_files} == {model}
    assert warnings == ()
