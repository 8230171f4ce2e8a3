"""Logits of sequences, of which no message could hold all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from kiln_client.hf import KilnForCausalLM

from tests.checkpoints.tiny_models import GEOMETRIES, draw_tokens, write_tiny_model
from tests.servers.stack import Stack, token_request
from tests.system.clients.hf.conftest import CONFIG

#: Half a megabyte of logits for each token.
VOCAB_SIZE: Final = 1 << 17
#: 68 MiB of logits. The Python client takes messages of 64 MiB, others of 4 MiB.
COUNT: Final = 136
PROMPT: Final = draw_tokens(5, seed=3)
WIDE: Final = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1}
LONG: Final = {"seq_len": 256, "token_generation_buckets": [256]}


@pytest.fixture(scope="module")
def wide(stack: Stack) -> Iterator[tuple[KilnForCausalLM, Any]]:
    """A model of many tokens, served and in transformers."""
    path = stack.new_model("wide")
    reference = write_tiny_model(path, next(iter(GEOMETRIES.values())) | WIDE).model
    stack.compile("wide", path, {"neuron_config": CONFIG["neuron_config"] | LONG})
    with stack.deployed("wide"):
        yield (
            KilnForCausalLM.from_pretrained(path, deployment_id="wide", address=stack.runtime, token=stack.token),
            reference,
        )


@pytest.mark.slow
def test_logits_of_generate_come_in_pieces(wide: tuple[KilnForCausalLM, Any]) -> None:
    asks = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "eos_token_id": None}
    ours, theirs = (model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, **asks) for model in wide)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert len(ours.logits) * VOCAB_SIZE * 4 > 64 << 20
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def test_logits_of_given_sequences_come_in_pieces(wide: tuple[KilnForCausalLM, Any]) -> None:
    served, reference = wide
    ids = torch.tensor([draw_tokens(24)])
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, reference(ids).logits, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("wide")
def test_a_late_client_of_small_messages_gets_all(stack: Stack) -> None:
    request = token_request("wide", PROMPT, 24, temperature=0.0)
    request.output.logits = True
    call = stack.generation().Generate(request)
    time.sleep(1)
    tokens = [token for event in call for token in event.delta.tokens]
    assert [len(token.logits) for token in tokens] == [VOCAB_SIZE] * 24
