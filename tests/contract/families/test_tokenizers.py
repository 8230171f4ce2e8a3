"""Tokenizers of the kinds that each family's checkpoints have: text in and out of a bundle is that of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from compiler_svc.builds.tokenizer_converter import convert
from compiler_svc.builds.tokenizer_orders import Conversion, Made
from compiler_svc.models.registry import list_families
from compiler_svc.weights.tokenizer_sources import SOURCES
from execution.text.bundle_text import BundleText
from execution.text.control import Load, SequenceTokens
from execution.text.detokenizer import Detokenizer
from execution.text.token_table import make_decoder
from tests.checkpoints.family_tokenizers import FAMILY_TOKENIZERS, VOCAB_SIZE

TEXTS = (
    "Hello, world!",
    "",
    "  two spaces, 12345 digits\n\n\tand tabs ",
    "Füße, çà et là; e\u0301 \u200b\u00a0",
    "你好，世界 🙂 👩‍👩‍👧 \U0001f9ff",
    "<|im_start|>user\nhi<|im_end|> <s></s><eos><|endoftext|><|eot_id|>",
)
CASES = [(architecture, form) for architecture, forms in FAMILY_TOKENIZERS.items() for form in forms]


class Tokenizers:
    """A tokenizer as bundles hold it, and as transformers reads the checkpoint."""

    def __init__(self, path: Path, architecture: str, form: str) -> None:
        FAMILY_TOKENIZERS[architecture][form](path)
        self.reference = self._load_reference(path)
        if not (path / "tokenizer.json").exists():
            source = next(one for one in SOURCES if all((path / name).exists() for name in one.files))
            classes = list_families()[architecture].tokenizer_classes
            load = Load(tokenizer="", tokenizer_config=str(path / "tokenizer_config.json"))
            order = Conversion(kind=source.kind, directory=path, load=load, vocab_size=VOCAB_SIZE, classes=classes)
            converted = convert(order)
            assert isinstance(converted, Made), converted
            (path / "tokenizer.json").write_bytes(converted.files["tokenizer.json"])
        load = Load(tokenizer=str(path / "tokenizer.json"), tokenizer_config=str(path / "tokenizer_config.json"))
        self.text = BundleText.load(load)

    @staticmethod
    def _load_reference(path: Path) -> PreTrainedTokenizerFast:
        if (path / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(path)
        declared = msgspec.json.decode((path / "tokenizer_config.json").read_bytes())["tokenizer_class"]
        return tokenizer_class_from_name(declared).from_pretrained(path)

    def list_sequences(self) -> list[list[int]]:
        """Token ids of the texts, parts of them, and ids at random: bytes of characters come apart."""
        sequences = [self.text.encode_text(text) for text in TEXTS]
        chosen = random.Random(0)
        cut = [ids[chosen.randrange(len(ids)) :] for ids in sequences if ids]
        size = len(self.reference)
        return sequences + cut + [[chosen.randrange(size) for _ in range(30)] for _ in range(30)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].removesuffix('ForCausalLM')}-{case[1]}")
def tokenizers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    return Tokenizers(tmp_path_factory.mktemp("tokenizer"), *request.param)


def test_every_family_has_a_tokenizer() -> None:
    architectures = {one for family in list_families().values() for one in family.architectures}
    assert architectures == set(FAMILY_TOKENIZERS)


def test_token_ids_are_those_of_transformers(tokenizers: Tokenizers) -> None:
    for text in TEXTS:
        assert tokenizers.text.encode_text(text) == tokenizers.reference.encode(text), text
        without = tokenizers.text.tokenizer.encode(text, add_special_tokens=False)
        assert without == tokenizers.reference.encode(text, add_special_tokens=False), text


def test_streams_are_what_transformers_decodes_at_once(tokenizers: Tokenizers) -> None:
    table = tokenizers.text.tokenizer.make_table()
    assert table is not None, "deltas of these families need no text process"
    decoder = make_decoder(table)
    for ids in tokenizers.list_sequences():
        expected = tokenizers.reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decoder.decode(ids) == expected
        # One byte that fits nothing takes those before it along, if they come at once.
        if "\ufffd" in expected:
            continue
        detokenizer = Detokenizer(decoder.decode, decoder.decode_one)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == expected
        # A text process does the same for decoders that no table stands for.
        pieces = tokenizers.text.detokenize(SequenceTokens(window=[], num_emitted=0, token_ids=ids))
        assert "".join(piece.text for piece in pieces) + (pieces[-1].rest if pieces else "") == expected


def test_constrained_text_is_what_transformers_decodes_behind_a_special_token(tokenizers: Tokenizers) -> None:
    def decode(ids: list[int]) -> str:
        return str(tokenizers.reference.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    table = tokenizers.text.tokenizer.make_table()
    assert table is not None
    assert table.special_ids
    decoder, special = make_decoder(table), table.special_ids[0]
    for sequence in tokenizers.list_sequences():
        ids = [special, *(one for one in sequence if one not in table.special_ids)]
        expected = decode(ids).removeprefix(decode([special]))
        assert decoder.decode_matched(ids) == expected
        if "\ufffd" not in expected:
            detokenizer = Detokenizer(decoder.decode_matched, decoder.decode_one)
            assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == expected


def test_texts_come_back(tokenizers: Tokenizers) -> None:
    normalizer: Any = tokenizers.reference.backend_tokenizer.normalizer
    # Spaces at the beginning are what transformers' LlamaTokenizer loses one of.
    for text in (text.lstrip(" ") for text in TEXTS[:5]):
        ids = tokenizers.text.encode_text(text)
        expected = text if normalizer is None else normalizer.normalize_str(text).replace("\u2581", " ")
        assert tokenizers.text.tokenizer.decode(ids) == expected
