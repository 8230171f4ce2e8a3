"""What quantization costs the shipped model: its perplexity over texts that it was not trained on."""

from __future__ import annotations

import copy
import math
import random
from typing import Final

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from bundle.abi.formats import FORMATS
from compiler_svc.models.transforms import INT4, ModelChanges, Quantization
from compiler_svc.weights.checkpoint import Checkpoint
from examples.tiny.corpus import BEDTIME, SEED, draw_document, encode_document
from execution.quantized_linear import dequantize
from tests.checkpoints.specs import make_plan
from tests.ranks.stepping import load_shard
from tests.repository import ROOT

MODEL: Final = ROOT / "examples/models/kiln-tiny"
#: By how much perplexity may rise, by what the format's name begins with.
MAX_RISES: Final = {"int8": 0.01, "f8e4m3": 0.03, "f8e5m2": 0.03, INT4: 0.06}
NUM_DOCUMENTS: Final = 8


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    """Documents by another seed than any of the training's, which are all near `SEED * 10`."""
    tokenizer, rng = PreTrainedTokenizerFast.from_pretrained(MODEL), random.Random(SEED * 1000)
    documents = (encode_document(tokenizer, draw_document(rng, BEDTIME)) for _ in range(NUM_DOCUMENTS))
    return [torch.tensor([tokens[:512]]) for tokens in documents]


@torch.no_grad()
def measure(model: LlamaForCausalLM, texts: list[Tensor]) -> float:
    """Perplexity of each token given those before it."""
    losses = torch.cat(
        [torch.nn.functional.cross_entropy(model(one).logits[0, :-1], one[0, 1:], reduction="none") for one in texts]
    )
    return math.exp(losses.mean())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return loaded


@pytest.fixture(scope="module")
def whole(model: LlamaForCausalLM, texts: list[Tensor]) -> float:
    return measure(model, texts)


@pytest.mark.parametrize("name", [*(name for name, row in FORMATS.items() if not row.group), INT4, "int4_by_32"])
def test_perplexity_rises_little(name: str, model: LlamaForCausalLM, texts: list[Tensor], whole: float) -> None:
    checkpoint = Checkpoint.open(MODEL)
    description = ModelChanges(quantization=Quantization(format=name)).apply(checkpoint.description)
    shard = load_shard(make_plan(checkpoint, description=description), checkpoint)
    quantized = copy.deepcopy(model)
    for linear in description.linears():
        # In place of the table, too, in the head, which has a matrix of its own then.
        left = dequantize(shard[f"{linear.name}.weight"], shard[f"{linear.name}.scale"])
        quantized.get_submodule(linear.name).weight = torch.nn.Parameter(left)
    (largest,) = (rise for start, rise in MAX_RISES.items() if name.startswith(start))
    assert 0 != measure(quantized, texts) / whole - 1 < largest
