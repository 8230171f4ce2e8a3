from __future__ import annotations

import pytest

from bench.measurements import Goal, Measurements
from bench.plan import QUICK
from bench.profile import group
from bench.report import goals, render


@pytest.fixture
def measured() -> Measurements:
    """Two rounds; the machine was twice as slow in the second."""
    measured = Measurements(once={"load.first": 2.0, "load.again": 0.5, "lower.token_generation_128, batch 1": 9.0})
    for slowness in (1, 2):
        measured.add("bandwidth", 40e9 / slowness)
        measured.add("gemm", 200e9 / slowness)
        for name, seconds in {
            "bare.prefill": 0.1,
            "eager.prefill": 0.2,
            "raw": 50e-6,
            "raw.paced": 80e-6,
            "pause": 1e-3,
        }.items():
            measured.add(name, seconds * slowness)
        for batch in QUICK.batches:
            for name, seconds in {"bare.decode": 0.010, "served.decode": 0.0125, "eager.decode": 0.030}.items():
                measured.add(f"{name}.{batch}", seconds * slowness)
            measured.add(f"front.{batch}", 100e-6 * slowness)
    measured.skipped["openvino"] = "left out, not installed"
    measured.profiles = {"decode, batch 1": {"attention": 0.1}, "prefill": {"attention": 0.2, "kernel": 0.001}}
    return measured


def test_ratios_are_of_figures_of_one_round(measured: Measurements) -> None:
    figures = {goal.name: (round(goal.figure, 3), goal.is_met) for goal in goals(measured, 320_000_000)}
    assert figures == {
        "bare decode, share of read bandwidth": (0.8, True),
        "bare decode, times transformers eager": (3.0, True),
        "through gRPC, 1 stream, share of bare": (0.8, False),
        "front CPU by token, times a raw grpc.aio write": (2.0, True),
        "LoadWeights pause, decode steps": (0.1, True),
    }


def test_the_page_shows_every_engine_and_what_was_left_out(measured: Measurements) -> None:
    page = render(measured, QUICK, (100_000_000, 80_000_000))
    assert "| through gRPC, 1 stream, share of bare | 0.80 | ≥ 0.95 | **no** |" in page
    assert "| Kiln, bare executable | 10.0 (100 tokens/s; 1.00× bare's time) |" in page
    assert "| transformers eager | 30.0 (33 tokens/s; 3.00× bare's time) |" in page
    assert "| transformers eager | 200.0 ms | 0.13 | 2.00 |" in page
    assert "- openvino: left out, not installed." in page
    assert "| the same at the pace of 1 stream's tokens | 80 µs |" in page
    assert "| front, CPU a token, 4 streams | 100 µs (2.0× raw, 1.2× raw at that pace) |" in page
    assert "| attention | 10.0% | 20.0% |" in page
    assert "| kernel |" not in page


def test_goals_may_be_upper_limits() -> None:
    assert Goal("pause", 0.5, 1, at_least=False).is_met
    assert not Goal("pause", 1.5, 1, at_least=False).is_met


def test_samples_are_grouped_by_what_they_are_for() -> None:
    report = """
# Overhead|Shared Object|Symbol
60.00%|executable.so     |[.] void kiln::multiply_tile<4, 2, float>(float const*)
 5.00%|executable.so     |[.] kiln::dot<float>
10.00%|libtorch_cpu.so   |[.] mkl_blas_def_xsgemv
 8.00%|libgomp.so.1      |[.] gomp_team_barrier_wait_end
 7.00%|[kernel.kallsyms] |[k] finish_task_switch
 6.00%|executable.so     |[.] cpp_fused_add_mul_3
 4.00%|libpython3.11.so  |[.] _PyEval_EvalFrameDefault
"""
    assert group(report) == pytest.approx(
        {
            "linear layers (kiln::linear)": 0.65,
            "attention": 0.10,
            "threads that wait": 0.08,
            "kernel": 0.07,
            "norms, rotation, activations, sampling (generated code)": 0.06,
            "the interpreter and the calls": 0.04,
        }
    )
