"""Embeddings that are multiplied, rounded as transformers rounds them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from compiler_svc.models.divisions import Axis
from compiler_svc.models.layers.linear import Embedding, round_to
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.specs import EmbeddingSpec
from tests.fuzzing import fuzz

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@fuzz(500)
@given(number=st.floats(min_value=2.0**-10, max_value=60_000.0, width=32))
def test_numbers_are_rounded_as_tensors_are(number: float, dtype: torch.dtype) -> None:
    assert round_to(number, dtype) == float(torch.tensor(number).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds_multiplier", [True, False])
def test_embeddings_are_multiplied(dtype: torch.dtype, rounds_multiplier: bool) -> None:
    multiplier = 3072**0.5
    table = torch.randn((11, 6), generator=torch.Generator().manual_seed(1)).to(dtype)
    embedding = Embedding(EmbeddingSpec("embedding", Axis(11), Axis(6), multiplier, rounds_multiplier), Ranks(1))
    embedding.weight.data = table
    ids = torch.arange(11, dtype=torch.int32)
    theirs = Gemma2TextScaledWordEmbedding(11, 6, 0, embed_scale=multiplier).to(dtype)
    theirs.weight.data = table
    expected = theirs(ids) if rounds_multiplier else table * multiplier
    assert torch.equal(embedding(ids, dtype), expected)
