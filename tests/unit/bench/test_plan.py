"""Workloads as data: what they ask of bundles, and how much work their steps are."""

from __future__ import annotations

import pytest

from bench.formats import FORMATS, PLAIN
from bench.measurements import Reads
from bench.peers import PEERS
from bench.plan import (
    DEFAULT,
    FORMAT_WORKLOADS,
    LARGE,
    LARGE_FORMATS,
    PREFILL,
    PREFIXES,
    QUICK_FORMATS,
    WORKLOADS,
    Workload,
    decode_bundle,
    prefill_bundle,
)
from bench.work import Work, decode_work, prefill_work
from compiler_svc.config import resolve_config
from runtime_svc.settings import parse_settings


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_bundles_have_a_bucket_for_what_is_measured(workload: Workload) -> None:
    for name, document in workload.bundles.items():
        config = resolve_config(document, checkpoint_dtype=workload.dtype, target="cpu").config.neuron_config
        if name.endswith(PREFILL):
            buckets = set(workload.prompts)
        else:
            buckets = {PREFIXES: set()}.get(name, {config.max_context_length})
        if name == PREFILL and (crowd := workload.crowd) is not None:
            buckets |= {crowd.chunk, crowd.prompt}
            assert config.batch_size == crowd.streams + 1, "room for the prompt beside the streams"
            assert config.seq_len > crowd.prompt
        if name == PREFIXES and (prefix := workload.prefix) is not None:
            buckets = {prefix.own, prefix.shared + prefix.own}
            assert config.prefix_buckets[-1] == prefix.shared
        assert set(config.context_encoding_buckets) == buckets
        if workload.is_served and name in map(decode_bundle, workload.batches):
            assert config.max_context_length == workload.context, "clients send prompts of so many tokens"
    for batch in workload.batches:
        assert workload.context + workload.count_tokens(batch) <= workload.length
        assert workload.decode_position(batch) + workload.count_steps(batch) // 2 < workload.length
        assert workload.count_tokens(batch) * batch >= 2 * batch, "every stream has tokens while all of them run"
    assert all(workload.count_prefills(tokens) >= 1 for tokens in workload.prompts)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_every_engine_has_bundles_of_its_format(workload: Workload) -> None:
    for engine, format_ in workload.bare_engines.items():
        names = [decode_bundle(batch, engine) for batch in workload.batches]
        for name in names + [prefill_bundle(engine)] * bool(workload.prompts):
            said = workload.bundles[name]["neuron_config"]
            assert said.items() >= format_.config.items()
            assert said["torch_dtype"] == (format_.dtype or workload.dtype)


def test_formats_are_measured_alike_in_runs_of_all_sizes() -> None:
    def describe(workload: Workload) -> tuple[object, ...]:
        return (workload.format, workload.variants, workload.is_served, bool(workload.raced))

    tiny, small, large = (
        [describe(workload) for workload in workloads] for workloads in (QUICK_FORMATS, FORMAT_WORKLOADS, LARGE_FORMATS)
    )
    assert tiny == small
    assert large == small[:2]
    assert {"int8", "int4"} <= {format_ for format_, *_ in large}
    caches = FORMAT_WORKLOADS[3]
    assert caches.decode_position(16) >= 4000, "positions whose keys and values a step reads"


def test_peers_are_those_that_have_the_format() -> None:
    assert set(FORMATS[PLAIN].peers) == set(PEERS)
    assert all(set(format_.peers) <= set(PEERS) for format_ in FORMATS.values())
    int8, int4, *others = FORMAT_WORKLOADS
    assert int8.peers == {"openvino": "int8", "llama_cpp": "Q8_0"}
    assert int4.peers == {"openvino": "int4", "llama_cpp": "Q4_K_M"}
    raced = [workload for workload in others if workload.raced]
    assert [set(workload.peers) for workload in raced] == [{"llama_cpp", "vllm"}], "these have adapters"
    assert all(not workload.peers for workload in others if workload not in raced), "no peer runs where none is raced"


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_what_takes_long_is_measured_in_so_many_rounds(workload: Workload) -> None:
    assert {*workload.raced, *workload.stepwise} <= set(workload.batches)
    long = [workload.is_measured(number, takes_long=True) for number in range(workload.rounds)]
    assert long[0], "a run that ends early has every figure"
    assert sum(long) == workload.few_rounds
    assert all(workload.is_measured(number, takes_long=False) for number in range(workload.rounds))


def test_states_of_switches_are_options_of_the_runtime() -> None:
    required = ["--address=127.0.0.1:0", "--compiler=127.0.0.1:1", "--cache=cache"]
    states = {
        (name, state): parse_settings([*required, *words], {})
        for name, switch in DEFAULT[0].switches.items()
        for state, words in {"on": switch.on, "off": switch.off}.items()
    }
    assert [states["chunks", state].max_chunk_tokens for state in ("on", "off")] == [256, 2048]
    assert [states["async", state].async_scheduling for state in ("on", "off")] == [True, False]


def test_work_of_steps() -> None:
    reads = Reads(weights_bytes=2e9, position_bytes=2 * 2 * 512 * 16)
    work = decode_work(LARGE, 1_000_000_000, reads, 4)
    positions = 4 * (LARGE.decode_position(4) + 1)
    assert work.size_bytes == 2 * (1e9 + 2 * positions * 512 * 16)
    assert work.operations == 2 * 4 * 1e9 + 4 * positions * 2048 * 16
    prompt = prefill_work(LARGE, 1_000_000_000, reads, 2048)
    assert prompt.size_bytes == 2e9
    assert prompt.operations == pytest.approx(2 * 2048 * (1e9 - 65.5e6) + 4 * 2048 * 2049 / 2 * 2048 * 16, rel=1e-3)
    assert Work(operations=10, size_bytes=20).least_s(rate=10, bandwidth=40) == 1
    assert Work(operations=10, size_bytes=20).least_s(rate=100, bandwidth=10) == 2


def test_streams_that_are_measured_together_last_until_all_have_begun() -> None:
    for workload in (*DEFAULT, LARGE):
        for batch in workload.batches:
            assert batch < workload.count_tokens(batch) <= workload.length - workload.context
