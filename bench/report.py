"""Renders the measurements as the page RESULTS.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from bench.measurements import Goal, Measurements
from bench.plan import Plan

Row = tuple[str, ...]


def goals(measured: Measurements, decode_bytes: int) -> list[Goal]:
    """The goals, with the figures that were measured."""
    found = measured.relate
    return [
        Goal(
            "bare decode, share of read bandwidth",
            found(lambda step, bandwidth: decode_bytes / step / bandwidth, "bare.decode.1", "bandwidth"),
            0.75,
            at_least=True,
        ),
        Goal(
            "bare decode, times transformers eager",
            found(lambda eager, bare: eager / bare, "eager.decode.1", "bare.decode.1"),
            1.6,
            at_least=True,
        ),
        Goal(
            "through gRPC, 1 stream, share of bare",
            found(lambda bare, served: bare / served, "bare.decode.1", "served.decode.1"),
            0.95,
            at_least=True,
        ),
        Goal(
            "front CPU by token, times a raw grpc.aio write",
            found(lambda front, raw: front / raw, "front.1", "raw"),
            3.0,
            at_least=False,
        ),
        Goal(
            "LoadWeights pause, decode steps",
            found(lambda pause, step: pause / step, "pause", "bare.decode.1"),
            1.0,
            at_least=False,
        ),
    ]


def render(measured: Measurements, plan: Plan, parameters: tuple[int, int]) -> str:
    """Renders the page in Markdown.

    Args:
        parameters: Number of the model's parameters, and of those that a decode step reads.
    """
    sections = [
        "# Results",
        _introduce(plan, parameters),
        f"Machine: {describe_machine()}.",
        "## Goals\n\n"
        + render_table(("what", "figure", "goal", "met"), _goal_rows(goals(measured, parameters[1] * 4))),
        "## Limits\n\n" + render_table(("what", "figure"), _limit_rows(measured)),
        "## Decode, milliseconds a step of all streams\n\n" + _decode_table(measured, plan, parameters[1] * 4),
        f"## Prefill of {plan.prompt_tokens} tokens\n\n" + _prefill_table(measured, plan, parameters[1]),
        "## Services\n\n" + render_table(("what", "figure"), _service_rows(measured, plan)),
        "## Where the time of the bare steps goes\n\nSee also docs/performance.md. " + _profiles(measured),
    ]
    notes = [f"- {name}: {note}." for name, note in {**measured.notes, **measured.skipped}.items()]
    return "\n\n".join([*sections, "## Notes\n\n" + "\n".join(notes)]) + "\n"


def _introduce(plan: Plan, parameters: tuple[int, int]) -> str:
    shape = plan.model
    layers = f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}"
    heads = f"{shape['num_attention_heads']} heads on {shape['num_key_value_heads']} KV heads"
    return (
        f"Written by `make bench`. A random Llama of {parameters[0] / 1e6:.0f} M parameters ({layers}, {heads},\n"
        f"vocabulary {shape['vocab_size']}), float32, `-O1`, {plan.num_threads} threads for everything. A decode step "
        f"reads {parameters[1] * 4 / 1e6:.0f} MB of weights.\nFigures are medians of {plan.rounds} rounds in which all "
        "took turns; ratios are medians of the rounds' ratios."
    )


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


def _goal_rows(aims: Sequence[Goal]) -> list[Row]:
    return [
        (
            aim.name,
            f"{aim.figure:.2f}",
            f"{'≥' if aim.at_least else '≤'} {aim.goal:g}",
            "yes" if aim.is_met else "**no**",
        )
        for aim in aims
    ]


def _limit_rows(measured: Measurements) -> list[Row]:
    return [
        ("read bandwidth (torch sum of 1 GiB f32)", f"{measured.typical('bandwidth') / 1e9:.1f} GB/s"),
        ("matrix product (torch, 2048 × 2048 f32)", f"{measured.typical('gemm') / 1e9:.0f} GFLOP/s"),
    ]


def _engines(measured: Measurements, suffix: str) -> list[str]:
    return [engine for engine in ("bare", "served", "eager", "openvino", "llama_cpp") if measured.has(engine + suffix)]


_TITLES = {
    "bare": "Kiln, bare executable",
    "served": "Kiln, through gRPC",
    "eager": "transformers eager",
    "openvino": "OpenVINO GenAI",
    "llama_cpp": "llama.cpp",
}


def _decode_table(measured: Measurements, plan: Plan, decode_bytes: int) -> str:
    first = plan.batches[0]
    rows = []
    for engine in _engines(measured, f".decode.{first}"):
        cells = [_TITLES[engine]]
        for batch in plan.batches:
            name = f"{engine}.decode.{batch}"
            if not measured.has(name):
                cells.append("–")
                continue
            step_s = measured.typical(name)
            relative = measured.relate(lambda other, bare: other / bare, name, f"bare.decode.{batch}")
            cells.append(f"{step_s * 1e3:.1f} ({batch / step_s:.0f} tokens/s; {relative:.2f}× bare's time)")
        share = measured.relate(
            lambda step, bandwidth: decode_bytes / step / bandwidth, f"{engine}.decode.{first}", "bandwidth"
        )
        rows.append((*cells, f"{share:.2f}"))
    return render_table(("engine", *map(_streams, plan.batches), "of read bandwidth, 1 stream"), rows)


def _prefill_table(measured: Measurements, plan: Plan, parameters: int) -> str:
    # Every token passes through the layers, but only the last one needs logits.
    head = plan.model["vocab_size"] * plan.model["hidden_size"]
    operations = 2 * (plan.prompt_tokens * (parameters - head) + head)
    rows = []
    for engine in _engines(measured, ".prefill"):
        name = f"{engine}.prefill"
        step_s = measured.typical(name)
        share = measured.relate(lambda step, gemm: operations / step / gemm, name, "gemm")
        relative = measured.relate(lambda other, bare: other / bare, name, "bare.prefill")
        rows.append((_TITLES[engine], f"{step_s * 1e3:.1f} ms", f"{share:.2f}", f"{relative:.2f}"))
    return render_table(("engine", "time", "of the matrix product's rate", "times bare's time"), rows)


def _service_rows(measured: Measurements, plan: Plan) -> list[Row]:
    once = measured.once
    rows = [
        ("LoadBundle to ready, first time (hashes every blob)", f"{once['load.first']:.2f} s"),
        ("LoadBundle to ready, again", f"{once['load.again']:.2f} s"),
        ("LoadWeights pause", f"{measured.typical('pause') * 1e3:.2f} ms"),
        ("raw grpc.aio stream write, CPU a message, one after the other", f"{measured.typical('raw') * 1e6:.0f} µs"),
        ("the same at the pace of 1 stream's tokens", f"{measured.typical('raw.paced') * 1e6:.0f} µs"),
    ]
    for batch in plan.batches:
        name = f"front.{batch}"
        if measured.has(name):
            times = [measured.relate(lambda front, raw: front / raw, name, raw) for raw in ("raw", "raw.paced")]
            figure = f"{measured.typical(name) * 1e6:.0f} µs ({times[0]:.1f}× raw, {times[1]:.1f}× raw at that pace)"
            rows.append((f"front, CPU a token, {_streams(batch)}", figure))
    rows += [
        (f"compiling {name.removeprefix('lower.')}", f"{seconds:.1f} s")
        for name, seconds in once.items()
        if name.startswith("lower.")
    ]
    return rows


def _profiles(measured: Measurements) -> str:
    profiles = measured.profiles
    if not any(profiles.values()):
        return "Not known: this host has no `perf`."
    kinds = {what: max(one.get(what, 0.0) for one in profiles.values()) for one in profiles.values() for what in one}
    rows = [
        (what, *(f"{one.get(what, 0.0):.1%}" for one in profiles.values()))
        for what, share in sorted(kinds.items(), key=lambda item: -item[1])
        if share >= 0.002
    ]
    return "Shares of both threads' time.\n\n" + render_table(("what", *profiles), rows)


def render_table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Renders a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def describe_machine() -> str:
    """Returns the processor, memory, kernel and Python of this host."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    instructions = "AVX-512" if "avx512f" in text else "AVX2" if "avx2" in text else "no AVX2"
    return (
        f"{model or platform.machine()}, {os.cpu_count()} cores, {instructions}, {memory_gib:.0f} GiB; "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )
