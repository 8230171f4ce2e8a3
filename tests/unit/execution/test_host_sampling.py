"""A rank that picks tokens on the host, from the logits of live rows alone."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from bundle.abi.outputs import IDLE_TOKEN
from execution.ranks import rank as rank_module
from execution.ranks.control import Launch, Load, RunStep
from execution.ranks.rank import Rank
from execution.ranks.step_memory import StepLayout
from execution.sampling import greedy
from tests.bundles.manifests import DYNAMIC, VOCAB_SIZE, make_manifest

ROWS, TAG = 3, "token_generation_16"


@dataclass
class Logits:
    """An executor that returns the same logits in each step."""

    logits: Tensor
    weights_bytes: int = 0
    state_bytes: int = 0

    def run(self, _tag: str, _inputs: Mapping[str, Tensor], *, with_old: bool) -> dict[str, Tensor]:
        assert not with_old
        return {"logits": self.logits}


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
