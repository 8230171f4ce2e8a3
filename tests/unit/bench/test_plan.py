"""Workloads as data: what they ask of bundles, and how much work their steps are."""

from __future__ import annotations

import pytest

from bench.plan import DEFAULT, LARGE, WORKLOADS, Workload
from bench.work import Work, decode_work, prefill_work
from compiler_svc.config import resolve_config


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_bundles_have_a_bucket_for_what_is_measured(workload: Workload) -> None:
    for name, document in workload.bundles.items():
        config = resolve_config(document, checkpoint_dtype=workload.dtype, target="cpu").config.neuron_config
        assert config.torch_dtype == workload.dtype
        assert len(config.context_encoding_buckets) == (len(workload.prompts) if name == "prefill" else 1)
    for batch in workload.batches:
        assert workload.context + workload.count_tokens(batch) <= workload.length
        assert workload.decode_position(batch) + workload.count_steps(batch) // 2 < workload.length
        assert workload.count_tokens(batch) * batch >= 2 * batch, "every stream has tokens while all of them run"
    assert all(workload.count_prefills(tokens) >= 1 for tokens in workload.prompts)


def test_workloads_are_those_of_the_goals() -> None:
    assert [workload.dtype for workload in DEFAULT] == ["float32", "bfloat16"]
    assert LARGE.model["num_attention_heads"] // LARGE.model["num_key_value_heads"] == 4


def test_work_of_steps() -> None:
    work = decode_work(LARGE, 1_000_000_000, 4)
    positions = 4 * (LARGE.decode_position(4) + 1)
    assert work.size_bytes == 2 * (1e9 + 2 * positions * 512 * 16)
    assert work.operations == 2 * 4 * 1e9 + 4 * positions * 2048 * 16
    prompt = prefill_work(LARGE, 1_000_000_000, 2048)
    assert prompt.operations == pytest.approx(2 * 2048 * (1e9 - 65.5e6) + 4 * 2048 * 2049 / 2 * 2048 * 16, rel=1e-3)
    assert Work(operations=10, size_bytes=20).least_s(rate=10, bandwidth=40) == 1
    assert Work(operations=10, size_bytes=20).least_s(rate=100, bandwidth=10) == 2
