"""The page and its figures, from measurements that a test makes."""

from __future__ import annotations

import pytest

from bench.goals import Goal, list_goals, share_of_limit
from bench.measurements import Measurements, Reads
from bench.plan import QUICK, QUICK_FORMATS
from bench.profile import group
from bench.report import Section, render

WORKLOAD = QUICK[0]
PARAMETERS = 80_000_000


@pytest.fixture
def measured() -> Measurements:
    """Two rounds; the machine was twice as slow in the second."""
    measured = Measurements(once={"load.first": 2.0, "load.again": 0.5, "lower.batch4.token_generation_64": 9.0})
    measured.once |= {"compile.batch4": 20.0, "compile.batch4.cpu": 12.0}
    measured.reads["bare"] = Reads(weights_bytes=4.0 * PARAMETERS, position_bytes=2048)
    for slowness in (1, 2):
        measured.begin_round()
        for unit, rate in {"read": 40e9, "float32": 200e9}.items():
            for figure, part in {"": 1.0, ".alone": 0.6, ".thread": 0.5}.items():
                measured.add(f"limit.{unit}{figure}", rate * part / slowness)
        figures = {"raw": 50e-6, "raw.paced": 80e-6, "pause": 1e-3}
        figures |= {"chunks.on.calm.99": 0.02, "chunks.on.crowded.99": 0.06, "bare.chunk": 0.04, "prefix.on": 0.04}
        figures |= {"chunks.off.crowded.99": 0.3, "prefix.off": 0.2, "async.on.4": 0.01, "async.off.4": 0.015}
        figures |= {"rank.4": 0.004, "client.4": 300e-6}
        figures |= {f"front.{batch}": 100e-6 for batch in WORKLOAD.batches}
        steps = {"bare": 0.010, "served": 0.0125, "eager": 0.030}
        figures |= {f"{name}.decode.{batch}": s for batch in WORKLOAD.batches for name, s in steps.items()}
        prefills = {"bare": 0.1, "eager": 0.2}
        figures |= {f"{name}.prefill.{tokens}": s for tokens in WORKLOAD.prompts for name, s in prefills.items()}
        for name, seconds in figures.items():
            measured.add(name, seconds * slowness)
            measured.add(f"{name}.cpu", seconds * slowness * 1.5)
        measured.add("others", 0.01)
        measured.add("stolen", 0.0)
    measured.pool("first.4", [0.1, 0.2])
    measured.pool("gap.4", [number / 1000 for number in range(1, 101)])
    measured.failures["OpenVINO GenAI"] = "not installed"
    measured.profiles = {"decode, 1 stream": {"attention": 0.1}, "prefill": {"attention": 0.2, "kernel": 0.001}}
    return measured


def page_of(measured: Measurements) -> str:
    return render([Section(WORKLOAD, measured, 100_000_000, PARAMETERS)], "make bench", duration_s=1800)


def test_ratios_are_of_figures_of_one_round(measured: Measurements) -> None:
    goals = list_goals(measured, WORKLOAD, PARAMETERS)
    figures = {goal.name: (round(goal.figure, 2), goal.is_met) for goal in goals if goal.figure is not None}
    assert figures == {
        "decode, 1 stream, of the time that reading takes at the bandwidth": (0.8, False),
        "decode, 1 stream, rate times transformers eager": (3.0, True),
        "decode, 4 streams, rate times transformers eager": (3.0, True),
        "through gRPC, 1 stream, of bare": (0.8, False),
        "prefill, 32 tokens, rate times transformers eager": (2.0, True),
        "prefill, 64 tokens, rate times transformers eager": (2.0, True),
        "front CPU a token, 1 stream, times a raw stream's at that pace": (1.25, True),
        "a prompt of 64 among 2 streams, p99 between tokens rises by chunks": (1.0, True),
        "LoadWeights pause, decode steps": (0.1, True),
    }


def test_a_limit_is_what_takes_longer(measured: Measurements) -> None:
    # 320 MB of weights at 40 GB/s are 8 ms; 4 tokens are 0.64 GFLOP, 3.2 ms at 200 GFLOP/s; 64 are 51 ms.
    assert share_of_limit(measured, WORKLOAD, PARAMETERS, "bare.decode.4") == pytest.approx(0.80, abs=0.01)
    assert share_of_limit(measured, WORKLOAD, PARAMETERS, "bare.prefill.64") == pytest.approx(0.51, abs=0.01)


def test_the_page_shows_every_engine_and_what_was_left_out(measured: Measurements) -> None:
    page = page_of(measured)
    assert "| through gRPC, 1 stream, of bare | 0.80 | ≥ 0.97 | **no** |" in page
    assert "| Kiln, bare executable | 10.0 ms (10.0–20.0) | 100 | 15.0 ms | 1.00 | 0.80 |" in page
    assert "| transformers eager | 30.0 ms (30.0–60.0) | 133 | 45.0 ms | 3.00 | 0.27 |" in page
    assert "| transformers eager | 200.0 ms (200.0–400.0) | 320 | 300.0 ms | 2.00 | 0.25 |" in page
    assert "| reading 1 GiB, anonymous memory in huge pages | 12.0 GB/s | 20.0 GB/s | 10.0 GB/s |" in page
    assert "| OpenVINO GenAI | not installed |" in page
    assert "| decode, 4 streams, rate times OpenVINO GenAI | not measured | ≥ 1.05 | **no** |" in page
    assert "in 30 minutes" in page
    assert "| front, CPU a token, 4 streams | 100 µs (2.0× raw, 1.2× raw at that pace) |" in page
    assert "| batch4 | 20.0 s | token_generation_64 9.0 s | 12.0 s |" in page
    assert "| 4 | 100.0 | 200.0 | 50.0 | 99.0 |" in page
    assert "| attention | 10.0% | 20.0% |" in page
    assert "| kernel |" not in page


def test_the_page_compares_switches(measured: Measurements) -> None:
    page = page_of(measured)
    what = "chunks: between tokens until the prompt's first one, p99"
    assert f"| {what} | 60.0 ms (60.0–120.0) | 300.0 ms (300.0–600.0) | 5.00 |" in page
    assert "| prefix cache: first token of 64 shared and 16 own tokens | 40.0 ms (40.0–80.0) |" in page
    assert (
        "| async scheduling: a step of 4 streams through gRPC | 10.0 ms (10.0–20.0) | 15.0 ms (15.0–30.0) | 1.50 |"
        in page
    )
    assert "| 4 | 15.0 | 16.0 | 0.4 | 1.2 |" in page


def test_what_fails_in_a_round_is_named_and_costs_no_other_figure(measured: Measurements) -> None:
    measured.begin_round()
    with measured.attempt("decode of 4 streams, bare"):
        raise ValueError("no | slot\nleft")
    measured.add("served.decode.4", 0.0125)
    page = page_of(measured)
    assert "| decode of 4 streams, bare | ValueError: no / slot left |" in page
    assert "| Kiln, through gRPC | 12.5 ms (12.5–25.0) | 320 |" in page


def test_a_page_of_nothing_says_why() -> None:
    page = page_of(Measurements(failures={"the services": "gone"}))
    assert "| the services | gone |" in page
    assert "| through gRPC, 1 stream, of bare | not measured |" in page


def test_the_page_says_whether_the_machine_was_busy(measured: Measurements) -> None:
    assert "**The machine was busy.**" not in page_of(measured)
    measured.add("others", 0.25)
    assert "**The machine was busy.** Other processes took up to 25% of the processors" in page_of(measured)


#: Bytes and operations a second of what `measure_formats` measures.
UNITS = {"read": 40e9, "float32": 200e9}


def measure_formats(figures: dict[str, float]) -> Measurements:
    """One round, on a machine that reads 40 GB/s and computes 200 GFLOP/s."""
    measured = Measurements(reads={"bare": Reads(80e6, 2048), "int8-cache": Reads(80e6, 512)})
    measured.begin_round()
    limits = {f"limit.{unit}{of}": rate for unit, rate in UNITS.items() for of in ("", ".alone", ".thread")}
    for name, figure in (limits | figures).items():
        measured.add(name, figure)
        measured.add(f"{name}.cpu", figure)
    return measured


INT8, INT4, DTYPES, CACHES, ADAPTERS, SERVED, REGISTERED = QUICK_FORMATS


def test_quantized_weights_are_compared_with_the_better_peer_and_with_the_bandwidth_of_their_own_bytes() -> None:
    # 80 MB at 40 GB/s are 2 ms.
    figures = {"bare.decode.1": 0.0025, "openvino.decode.1": 0.003, "llama_cpp.decode.1": 0.002}
    figures |= {"bare.prefill.32": 0.01, "llama_cpp.prefill.32": 0.015}
    goals = {goal.name: goal for goal in list_goals(measure_formats(figures), INT8, PARAMETERS)}
    assert list(goals) == [
        "decode, 1 stream, of the time that reading takes at the bandwidth",
        "decode, 1 stream, rate times the better peer's",
        "prefill, 32 tokens, rate times the better peer's",
        "prefill, 64 tokens, rate times the better peer's",
    ]
    share, decode, prefill, unmeasured = goals.values()
    assert (share.figure, share.is_met) == (pytest.approx(0.8, abs=0.01), False)
    assert (decode.figure, decode.is_met) == (pytest.approx(0.8), False)
    assert (prefill.figure, prefill.is_met) == (pytest.approx(1.5), True), "the only peer that ran is the better one"
    assert unmeasured.figure is None
    (int4,) = list_goals(measure_formats(figures), INT4, PARAMETERS)
    assert (int4.name, int4.goal) == ("decode, 1 stream, rate times the better peer's", 1.0)


def test_formats_of_our_own_are_compared_with_each_other() -> None:
    halves = {"float16.decode.1": 0.010, "bfloat16.decode.1": 0.008, "float16.decode.4": 0.010}
    goals = list_goals(measure_formats(halves | {"bfloat16.decode.4": 0.010}), DTYPES, PARAMETERS)
    figures = {goal.name: (goal.figure, goal.is_met) for goal in goals if goal.figure is not None}
    assert figures == {
        "decode, 1 stream, rate of float16 times that of bfloat16": (pytest.approx(0.8), False),
        "decode, 4 streams, rate of float16 times that of bfloat16": (pytest.approx(1.0), True),
    }


def test_adapters_are_compared_with_the_plain_model_and_with_peers_that_have_them() -> None:
    steps = {"bare.decode.1": 0.0104, "plain.decode.1": 0.01, "adapters-idle.decode.1": 0.011}
    goals = list_goals(measure_formats(steps | {"vllm.decode.1": 0.02, "swap": 0.002}), ADAPTERS, PARAMETERS)
    figures = {goal.name: (goal.figure, goal.is_met) for goal in goals if goal.figure is not None}
    assert figures == {
        "decode, 1 stream, rate times the better peer's": (pytest.approx(1.92, abs=0.01), True),
        "decode, 1 stream, rate of adapters times that of plain": (pytest.approx(0.96, abs=0.01), True),
        "decode, 1 stream, rate of adapters-idle times that of plain": (pytest.approx(0.91, abs=0.01), False),
        "another adapter in a slot, decode steps": (pytest.approx(0.19, abs=0.01), True),
    }


def test_quantized_weights_are_compared_through_grpc_with_the_bare_executable() -> None:
    goals = list_goals(measure_formats({"bare.decode.1": 0.009, "served.decode.1": 0.01}), SERVED, PARAMETERS)
    _, one, four = goals
    assert (one.name, one.figure, one.is_met) == ("through gRPC, 1 stream, of bare", pytest.approx(0.9), True)
    assert (four.name, four.figure) == ("through gRPC, 4 streams, of bare", None)


def test_adapters_that_no_stream_has_cost_the_streams_little() -> None:
    goals = list_goals(measure_formats({"registered.1": 1.02, "registered.4": 1.005}), REGISTERED, PARAMETERS)
    one, four, *_ = goals
    assert (one.name, one.is_met) == ("through gRPC, 1 stream, beside 1000 adapters, times without", False)
    assert four.is_met


def test_a_page_of_formats_shows_each_with_what_it_reads() -> None:
    # 4 rows of 85 positions of 200 KiB are 1.74 ms, those of 50 KiB 0.44 ms.
    measured = measure_formats({"bare.decode.4": 0.004, "int8-cache.decode.4": 0.00201})
    measured.reads = {name: Reads(0, reads.position_bytes * 100) for name, reads in measured.reads.items()}
    page = render([Section(CACHES, measured, 100_000_000, 0)], "make bench-formats", duration_s=60)
    assert "float32, beside int8 keys and values, a scale for each layer" in page
    assert "| Kiln, bare executable | 4.0 ms (4.0–4.0) | 1000 | 4.0 ms | 1.00 | 0.44 |" in page
    assert "| Kiln, bare executable, int8 keys and values, a scale for each layer | 2.0 ms" in page
    assert "| 0.50 | 0.22 |" in page
    assert "through gRPC" not in page


def test_goals_may_be_upper_limits() -> None:
    assert Goal("pause", 0.5, 1, at_least=False).is_met
    assert not Goal("pause", 1.5, 1, at_least=False).is_met


def test_samples_are_grouped_by_what_they_are_for() -> None:
    report = """
# Overhead|Shared Object|Symbol
60.00%|executable.so     |[.] void kiln::multiply_tile<4, 2, float>(float const*)
 3.00%|executable.so     |[.] kiln::dot<float>
 2.00%|executable.so     |[.] void kiln::add_outputs<float>(float const*, long)
10.00%|executable.so     |[.] void kiln::attend_tile<float, float>(kiln::Step<float, float> const&) [clone ._omp_fn.0]
 8.00%|libgomp.so.1      |[.] 0x000000000001e02a
 7.00%|[kernel.kallsyms] |[k] finish_task_switch
 5.00%|executable.so     |[.] cpp_fused_add_mul_3
 1.00%|libgrpc.so        |[.] poll
 4.00%|libpython3.11.so  |[.] _PyEval_EvalFrameDefault
"""
    assert group(report) == pytest.approx(
        {
            "linear layers (kiln::linear)": 0.63,
            "attention": 0.10,
            "threads that wait at barriers (libgomp)": 0.08,
            "kernel": 0.07,
            "norms, rotation, activations, sampling (generated code)": 0.05,
            "the interpreter and the calls": 0.04,
            "adapters (kiln::adapt)": 0.02,
            "the rest of libgrpc.so": 0.01,
        }
    )
