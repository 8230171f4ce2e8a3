"""`kiln run` with a checkpoint and a tokenizer of each family gives the text that transformers gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from tests.checkpoints.family_tokenizers import FAMILY_TOKENIZERS, VOCAB_SIZE
from tests.checkpoints.tiny_models import write_tiny_model
from tests.contract.families.geometries import GEOMETRIES
from tests.lowering_cache import share_lowering_cache
from tests.parity.reference import Reference
from tests.servers.stack import KILN

_TIMEOUT_S = 280
_PROMPT = "Once upon a time, 你好 🙂"
_NEW_TOKENS = 16
_END_ID = 2
_OPTIONS = ["-O", "0", "--override", "neuron_config.seq_len=128", "--override", "neuron_config.torch_dtype=float32"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("run-families") / "home"
    share_lowering_cache(path / "cache/compiler")
    yield path
    subprocess.run([KILN, "down", "--home", str(path)], check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)


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


def run(home: Path, name: str) -> dict[str, Any]:
    command = [KILN, "run", name, _PROMPT, *_OPTIONS, "--max-new-tokens", str(_NEW_TOKENS), "--temperature", "0"]
    result = subprocess.run(
        [*command, "--home", str(home), "--json"],
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    last: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert result.returncode == 0, (last, result.stderr)
    return last


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILY_TOKENIZERS)
def test_a_checkpoint_answers_as_in_transformers(home: Path, architecture: str) -> None:
    name, attributes = next(iter(GEOMETRIES[architecture].items()))
    path = home / "models" / f"{architecture}-{name}"
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": _END_ID}
    model = write_tiny_model(path, attributes | sizes, architecture=architecture).model
    next(iter(FAMILY_TOKENIZERS[architecture].values()))(path)
    tokenizer, prompt = read_tokenizer(path)
    silence_bytes(model, tokenizer)
    model.save_pretrained(path)
    reference = Reference(path, model)

    answer = run(home, path.name)
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
