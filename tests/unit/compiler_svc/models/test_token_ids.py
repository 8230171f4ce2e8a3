from typing import Any

import pytest

from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.token_ids import read_token_ids


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


@pytest.mark.parametrize("value", [10, -2, "2", 2.0, True, [1, 10]])
def test_ids_outside_the_vocabulary(value: object) -> None:
    with pytest.raises(ModelConfigInvalid, match=r"eos_token_id.*accepted: token ids from 0 to 9"):
        read_token_ids({"eos_token_id": value}, {}, 10)
