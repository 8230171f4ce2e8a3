"""Renders the measurements of the ways to a deployment as a page."""

from __future__ import annotations

from typing import Final

from bench.gateway.chats import CROWDS, ROWS, TOKENS
from bench.machine import describe_machine
from bench.measurements import Measurements
from bench.plan import Workload
from bench.tables import render_table

#: The ways that are measured, each with its name for people; the first is what the others are compared to.
WAYS: Final = {
    "service": "GenerationService",
    "engine": "vLLM's engine API",
    "gateway": "SMG, /v1/completions",
}


def render(measured: Measurements, plan: Workload, parameters: int) -> str:
    """Renders the page in Markdown.

    Args:
        parameters: Number of the model's parameters.
    """
    rows = []
    first = next(iter(WAYS))
    for batch in plan.batches:
        for way, title in WAYS.items():
            name = f"{way}.{batch}"
            step_s = measured.typical(f"{name}.step_s")
            share = measured.relate(lambda one, base: base / one, f"{name}.step_s", f"{first}.{batch}.step_s")
            rows.append(
                (
                    str(batch),
                    title,
                    f"{batch / step_s:.0f}",
                    f"{share:.2f}",
                    *(_micros(measured, f"{name}.{process}_cpu_s") for process in ("front", "gateway")),
                )
            )
    head = ("streams", "way", "tokens/s", "of GenerationService's", "front, CPU a token", "gateway, CPU a token")
    return (
        "# Ways to a deployment\n\n"
        f"Written by `python -m bench.gateway`. A random Llama of {parameters / 1e6:.0f} M parameters, float32, `-O1`, "
        f"{plan.num_threads} threads;\ngreedy streams of the same prompt. Figures are medians of {plan.rounds} rounds "
        "in which all took turns; ratios are\nmedians of the rounds' ratios. Clients, front, gateway and rank share "
        f"the processors.\n\nMachine: {describe_machine()}.\n\n{render_table(head, rows)}\n\n"
        f"{_render_chats(measured)}"
    )


def _render_chats(measured: Measurements) -> str:
    rows = []
    for chats in CROWDS:
        base = f"chats.{chats}.service_s"
        figures = [f"{measured.typical(base):.2f} s"]
        for way in ("stream", "whole"):
            name = f"chats.{chats}.{way}_s"
            share = measured.relate(lambda one, service: one / service, name, base)
            figures.append(f"{measured.typical(name):.2f} s ({share:.2f})")
        rows.append((str(chats), *figures))
    head = ("chats at once", "GenerationService", "SMG, streams", "SMG, whole")
    return (
        "## Chats at once\n\n"
        "Seconds until the last of the chats has ended, and the ratio to GenerationService's: the shipped model with\n"
        f"{ROWS} rows, {TOKENS} tokens each. The aim is a ratio of at most 1.3.\n\n"
        f"{render_table(head, rows)}\n"
    )


def _micros(measured: Measurements, name: str) -> str:
    return f"{measured.typical(name) * 1e6:.0f} µs" if measured.has(name) else "–"
