"""A rank that picks tokens on the host, from the logits of live rows alone."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from bundle.abi.inputs import UNPICKED_TOP_K
from bundle.abi.outputs import IDLE_TOKEN, NO_TOKEN
from execution.ranks import rank as rank_module
from execution.ranks.control import Launch, Load, PickTokens, RunStep
from execution.ranks.rank import Rank
from execution.ranks.step_memory import StepLayout
from execution.sampling import greedy
from execution.step import ProcessedRow
from tests.bundles.manifests import DYNAMIC, VOCAB_SIZE, make_manifest

ROWS, TAG = 3, "token_generation_16"


@dataclass
class Logits:
    """An executor that returns the same logits in each step, and notes what picks tokens."""

    logits: Tensor
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    asked: Tensor | None = None
    weights_bytes: int = 0
    state_bytes: int = 0

    def run(self, _tag: str, inputs: Mapping[str, Tensor], *, with_old: bool) -> dict[str, Tensor]:
        assert not with_old
        self.asked = inputs.get("sampling_params")
        return {"logits": self.logits, **self.outputs}


@pytest.mark.parametrize("num_live", [0, 2, ROWS])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_idle_rows_are_not_sampled(num_live: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(
        num_slots=ROWS, flags=("live_rows", "logits"), sampling=msgspec.structs.replace(DYNAMIC, mode="host")
    )
    logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits[num_live:] = float("nan")
    monkeypatch.setattr(rank_module, "load_executor", lambda *_: Logits(logits))
    memory = mmap.mmap(-1, StepLayout.of(manifest).size_bytes)
    launch = Launch(rank=0, num_threads=1, manifest=manifest, blob_paths={}, with_internal=False)
    rank: Any = Rank(launch, memory, None)
    rank.answer(Load(), lambda _part: None)
    views = rank._views[0][TAG]
    views.inputs["live_rows"][:] = num_live
    views.inputs["sampling_params"][:] = torch.tensor([1.0, 1.0, temperature])
    views.tokens[:] = 9
    views.logprobs[:] = 9
    step = RunStep(tag=TAG, memory_set=0, depends_on_previous=False, top_logprobs=2, return_logits=False)
    rank.answer(step, lambda _part: None)
    assert views.tokens.flatten()[:num_live].equal(greedy(logits[:num_live]))
    assert (views.tokens[num_live:] == IDLE_TOKEN).all(), "no row without numbers, which ends its sequence"
    assert views.logprobs.flatten()[:num_live].allclose(logits.log_softmax(-1)[:num_live].amax(-1))
    assert (views.logprobs[num_live:] == 9).all()


def test_executables_are_told_which_tokens_ranks_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(num_slots=ROWS)
    logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    executor = Logits(logits, {"tokens": torch.full((ROWS,), 7, dtype=torch.int32)})
    monkeypatch.setattr(rank_module, "load_executor", lambda *_: executor)
    memory = mmap.mmap(-1, StepLayout.of(manifest).size_bytes)
    rank: Any = Rank(Launch(rank=0, num_threads=1, manifest=manifest, blob_paths={}, with_internal=False), memory, None)
    rank.answer(Load(), lambda _part: None)
    views = rank._views[0][TAG]
    params = torch.tensor([[1.0, 1.0, 1.0], [5, 0.9, 0.5], [1, 0.8, 2]])
    views.inputs["sampling_params"][:] = params
    step = {"tag": TAG, "memory_set": 0, "depends_on_previous": False, "top_logprobs": None, "return_logits": False}
    rank.answer(RunStep(**step), lambda _part: None)
    assert executor.asked is not None
    assert executor.asked.equal(params)
    assert views.tokens.flatten().tolist() == [7, 7, 7]
    rank.answer(RunStep(**step, left=(0,), processed=(ProcessedRow(2),)), lambda _part: None)
    assert executor.asked[:, 0].tolist() == [UNPICKED_TOP_K, 5, UNPICKED_TOP_K]
    assert executor.asked[:, 1:].equal(params[:, 1:])
    assert views.inputs["sampling_params"].equal(params), "the rank picks by what the request asks for"
    assert views.tokens.flatten().tolist() == [NO_TOKEN, 7, greedy(logits)[2]]
    rank.answer(PickTokens(tag=TAG, processed=(ProcessedRow(0),)), lambda _part: None)
    assert views.tokens.flatten().tolist() == [greedy(logits)[0], 7, greedy(logits)[2]]
