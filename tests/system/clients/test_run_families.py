"""`kiln run` with a checkpoint and a tokenizer of each family gives the text that transformers gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from tests.checkpoints.families import FAMILIES
from tests.checkpoints.family_tokenizers import FAMILY_TOKENIZERS, VOCAB_SIZE
from tests.checkpoints.tiny_models import write_tiny_model
from tests.parity.reference import Reference
from tests.system.clients.conftest import SMALL, make_home, run_kiln

_PROMPT = "Once upon a time, 你好 🙂"
_NEW_TOKENS = 16
_END_ID = 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with make_home(tmp_path_factory.mktemp("run-families") / "home") as path:
        yield path


def read_tokenizer(path: Path) -> Any:
    """The checkpoint's tokenizer, as its class in transformers reads it."""
    if (path / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        return tokenizer, tokenizer.encode(_PROMPT).ids
    declared = json.loads((path / "tokenizer_config.json").read_text())["tokenizer_class"]
    tokenizer = tokenizer_class_from_name(declared).from_pretrained(path)
    return tokenizer, tokenizer.encode(_PROMPT)


@torch.no_grad()
def silence_bytes(model: Any, tokenizer: Any) -> None:
    """Keeps a random model from single bytes. They make no characters, and streams show each that comes by itself."""
    bytes_of = [token_id for token, token_id in tokenizer.get_vocab().items() if re.fullmatch("<0x..>", token)]
    model.get_output_embeddings().weight[bytes_of] = 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILY_TOKENIZERS)
def test_a_checkpoint_answers_as_in_transformers(home: Path, architecture: str) -> None:
    name, attributes = next(iter(FAMILIES[architecture].geometries.items()))
    path = home / "models" / f"{architecture}-{name}"
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": _END_ID}
    model = write_tiny_model(path, attributes | sizes, architecture=architecture).model
    next(iter(FAMILY_TOKENIZERS[architecture].values()))(path)
    tokenizer, prompt = read_tokenizer(path)
    silence_bytes(model, tokenizer)
    model.save_pretrained(path)
    reference = Reference(path, model)

    words = ("run", path.name, _PROMPT, *SMALL, "--max-new-tokens", str(_NEW_TOKENS), "--temperature", "0")
    answer = run_kiln(home, *words).last
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    greedy = reference.greedy(prompt, _NEW_TOKENS)
    # Behind a tie, both may go on as they like.
    count = greedy.ties.index(True) if True in greedy.ties else _NEW_TOKENS
    expected = greedy.tokens[:count]
    if _END_ID in expected:
        expected = expected[: expected.index(_END_ID) + 1]
    assert answer["token_ids"][: len(expected)] == expected
    assert len(expected) >= 4 or expected[-1] == _END_ID, "the reference decides for some tokens"
    if count == _NEW_TOKENS or expected[-1] == _END_ID:
        assert answer["text"] == read_continuation(tokenizer, prompt, expected)


def read_continuation(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """The text behind a prompt; decoders strip the first space of a text, so the prompt is decoded along."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *tokens]))
    return str(whole[len(before) :])
