"""The shipped model behind the services, where the host picks the tokens, and in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from kiln_client.hf import KilnForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.repository import ROOT
from tests.servers.stack import Stack

MODEL: Final = ROOT / "examples/models/kiln-tiny"
CONFIG: Final = {
    "neuron_config": {
        "torch_dtype": "float32",
        "batch_size": 4,
        "ctx_batch_size": 1,
        "is_continuous_batching": True,
        "seq_len": 128,
        "max_context_length": 64,
        "enable_bucketing": True,
        "context_encoding_buckets": [64],
        "token_generation_buckets": [128],
    }
}


@pytest.fixture(scope="module")
def deployment(stack: Stack) -> Iterator[str]:
    """A deployment of the shipped model."""
    stack.provide("tiny-host", MODEL, CONFIG)
    with stack.deployed("kiln-tiny", "tiny-host"):
        yield "kiln-tiny"


@pytest.fixture(scope="module")
def served(stack: Stack, deployment: str) -> KilnForCausalLM:
    return KilnForCausalLM.from_pretrained(MODEL, deployment_id=deployment, address=stack.runtime, token=stack.token)


@pytest.fixture(scope="session")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")
