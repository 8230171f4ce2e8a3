"""The page of the ways to a deployment."""

from bench.gateway.chats import CROWDS
from bench.gateway.report import WAYS, render
from bench.measurements import Measurements
from bench.plan import QUICK

PLAN = QUICK[0]


def test_ratios_are_of_figures_of_one_round() -> None:
    measured = Measurements()
    for slowness in (1, 2):
        measured.begin_round()
        for batch in PLAN.batches:
            for way, step_s in zip(WAYS, (0.010, 0.0125, 0.020), strict=True):
                measured.add(f"{way}.{batch}.step_s", step_s * slowness)
                measured.add(f"{way}.{batch}.front_cpu_s", 100e-6)
            measured.add(f"gateway.{batch}.gateway_cpu_s", 50e-6)
        for chats in CROWDS:
            for way, duration_s in (("service", 1.0), ("stream", 1.1), ("whole", 1.3)):
                measured.add(f"chats.{chats}.{way}_s", duration_s * slowness)
    page = render(measured, PLAN, 2_000_000)
    assert "| 4 | GenerationService | 400 | 1.00 | 100 µs | – |" in page
    assert "| 1 | SMG, /v1/completions | 50 | 0.50 | 100 µs | 50 µs |" in page
    assert "| 64 | 1.00 s | 1.10 s (1.10) | 1.30 s (1.30) |" in page
