"""Begin, end and padding tokens of a checkpoint's JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.token_ids import read_token_ids, warn_of_ids_beyond
from tests.checkpoints.random_weights import CONFIG, write_checkpoint


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({}, {}, (None, (), 0)),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}, {}, (1, (2,), 3)),
        ({"bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": [4, 5]}, (1, (4, 5), 4)),
        ({"eos_token_id": [6, 7], "pad_token_id": -1}, {"eos_token_id": None}, (None, (6, 7), 6)),
        ({"pad_token_id": None}, {"pad_token_id": 9}, (None, (), 9)),
    ],
)
def test_ids(config: dict[str, Any], generation_config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    tokens = read_token_ids(config, generation_config, 10)
    assert (tokens.bos, tokens.eos, tokens.pad) == expected
    assert tokens.vocab_size == 10


@pytest.mark.parametrize("value", [-2, "2", 2.0, True, [1, -10], [10, "2"]])
def test_ids_outside_the_vocabulary(value: object) -> None:
    with pytest.raises(ModelConfigInvalid, match=r"eos_token_id.*accepted: token ids from 0 to 9"):
        read_token_ids({"eos_token_id": value}, {}, 10)


def list_beyond(config: dict[str, Any], generation_config: dict[str, Any]) -> list[str]:
    return [one.partition(" left out")[0] for one in warn_of_ids_beyond(config, generation_config, 10)]


@pytest.mark.parametrize(
    ("config", "generation_config", "expected", "beyond"),
    [
        ({"eos_token_id": 2}, {"pad_token_id": 10}, (None, (2,), 2), ["generation_config.pad_token_id: 10"]),
        ({"pad_token_id": 3}, {"pad_token_id": 10}, (None, (), 3), ["generation_config.pad_token_id: 10"]),
        # Where one file's ids are left out, the other file's do not come in their place: transformers takes none.
        ({"eos_token_id": 2}, {"eos_token_id": [99, 12]}, (None, (), 0), ["generation_config.eos_token_id: 99, 12"]),
        ({}, {"eos_token_id": [4, 99]}, (None, (4,), 4), ["generation_config.eos_token_id: 99"]),
        (
            {"eos_token_id": [2, 1 << 70], "bos_token_id": 10},
            {},
            (None, (2,), 2),
            ["config.bos_token_id: 10", f"config.eos_token_id: {1 << 70}"],
        ),
        ({"eos_token_id": 99}, {"eos_token_id": 9}, (None, (9,), 9), []),
        ({"pad_token_id": -1}, {"pad_token_id": -1}, (None, (), 0), []),
    ],
)
def test_ids_beyond_the_rows_are_left_out_and_named(
    config: dict[str, Any], generation_config: dict[str, Any], expected: tuple[Any, ...], beyond: list[str]
) -> None:
    tokens = read_token_ids(config, generation_config, 10)
    assert (tokens.bos, tokens.eos, tokens.pad) == expected
    assert list_beyond(config, generation_config) == beyond


@pytest.mark.parametrize("generation_config", [{}, {"pad_token_id": 10}, {"pad_token_id": None}])
def test_padding_beyond_the_rows_in_the_models_own_file_is_refused(generation_config: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigInvalid, match=r"pad_token_id: got 10; accepted: token ids from 0 to 9"):
        read_token_ids({"pad_token_id": 10, "eos_token_id": 2}, generation_config, 10)


def test_transformers_draws_on_where_end_tokens_are_left_out_and_fails_with_such_padding(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", eos_token_id=5)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [96, 300], "pad_token_id": 96}))
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = torch.tensor([[7, 8]])
    drawn = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6)[0].tolist()
    assert len(drawn) == 8
    config = CONFIG | {"eos_token_id": drawn[2]}
    assert read_token_ids(config, {"eos_token_id": [96, 300], "pad_token_id": 96}, 96).eos == ()
    (path / "config.json").write_text(json.dumps(CONFIG | {"pad_token_id": 96}))
    with pytest.raises(AssertionError, match="Padding_idx must be within num_embeddings"):
        AutoModelForCausalLM.from_pretrained(path)
