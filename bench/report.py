"""Renders the measurements as a page such as RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Final

from bench.formats import FORMATS, PLAIN
from bench.goals import list_goals, share_of_limit
from bench.limits import UNITS
from bench.machine import describe_machine
from bench.measurements import Measurements
from bench.other_load import MAX_OTHERS
from bench.peers import PEERS
from bench.plan import ASYNC, BARE, CHUNKS, Crowd, Workload
from bench.tables import Row, count_streams, render_table

#: Engines by the prefix of their figures' names: those of the workload's own format, and Kiln in others.
_TITLES: Final = {
    BARE: "Kiln, bare executable",
    "served": "Kiln, through gRPC",
    **{name: f"Kiln, bare executable, {format_.title}" for name, format_ in FORMATS.items()},
    **{name: peer.title for name, peer in PEERS.items()},
}
#: What stands in the place of a figure that there is not.
_NONE: Final = "–"
_LOADS: Final = {
    "load.first": "LoadBundle to ready, first time (hashes every blob)",
    "load.again": "LoadBundle to ready, again",
}
_RAW_STREAMS: Final = {
    "raw": "raw grpc.aio stream write, CPU a message, one after the other",
    "raw.paced": "the same at the pace of 1 stream's tokens",
}
_CROWD_FIGURES: Final = {
    "chunks: between tokens before the prompt, p50": "calm.50",
    "chunks: between tokens before the prompt, p99": "calm.99",
    "chunks: between tokens until the prompt's first one, p50": "crowded.50",
    "chunks: between tokens until the prompt's first one, p99": "crowded.99",
    "chunks: first token of the prompt": "first",
}


@dataclass(frozen=True, slots=True)
class Section:
    """What a page says of one workload. A decode step reads `num_read` parameters: all but other tokens' embeddings."""

    workload: Workload
    measured: Measurements
    num_parameters: int
    num_read: int


def render(sections: Sequence[Section], command: str, duration_s: float) -> str:
    """Renders the page in Markdown."""
    head = (
        "# Results\n\n"
        f"Written by `{command}`, in {duration_s / 60:.0f} minutes.\n"
        "Random Llamas, `-O1`, compiled for this host. Figures are medians of rounds in\n"
        "which all engines took turns, with the least and the greatest in brackets; ratios are medians of the rounds'\n"
        "ratios. "
        "*CPU* is processor time of all threads of an engine, those that wait for others included.\n\n"
        f"Machine: {describe_machine()}."
    )
    return "\n\n".join([head, *map(_render_section, sections)]) + "\n"


def _render_section(section: Section) -> str:
    measured = section.measured
    parts = [f"## {_title(section)}", _introduce(section), *_notice(measured)]
    for title, head, rows in _tables(section):
        if rows:
            parts.append(f"### {title}\n\n" + render_table(head, rows))
    parts.append("### Where the time of the bare steps goes\n\nSee also docs/performance.md. " + _profiles(measured))
    notes = [f"- {_TITLES.get(name, name)}: {note}." for name, note in measured.notes.items()]
    return "\n\n".join([*parts, "### Notes\n\n" + "\n".join(notes)])


def _tables(section: Section) -> Iterator[tuple[str, Row, list[Row]]]:
    workload, measured = section.workload, section.measured
    yield "Goals", ("what", "figure", "goal", "met"), _goal_rows(section)
    # A reason may have several lines, and bars.
    failures: list[Row] = [
        (what, " ".join(why.split()).replace("|", "/")[:300]) for what, why in measured.failures.items()
    ]
    yield "Failed", ("what", "why"), failures
    threads = f"{workload.num_threads} threads"
    yield "Limits", ("what", "1 thread", threads, f"a thread of {threads}, by its CPU"), _limit_rows(section)
    engine_head = ("engine", "time", "tokens/s", "CPU", "times bare's time", "of the limit")
    for batch in workload.batches:
        yield f"Decode, a step of {count_streams(batch)}", engine_head, _engine_rows(section, f"decode.{batch}", batch)
    for tokens in workload.prompts:
        yield f"Prefill of {tokens} tokens", engine_head, _engine_rows(section, f"prefill.{tokens}", tokens)
    latency_head = ("streams", "first token, p50", "p99", "between tokens, p50", "p99")
    yield "Latency through gRPC, milliseconds", latency_head, _latency_rows(section)
    crowd = "a prompt among streams" if workload.crowd is None else _describe_crowd(workload.crowd)
    switch_head = ("what", "on", "off", "off/on")
    yield f"Switches: chunks of {crowd}; prefix cache; async scheduling", switch_head, _switch_rows(section)
    time_head = ("streams", "bare step", "rank", "front", "client")
    yield "Processor time of a step through gRPC, milliseconds", time_head, _time_rows(section)
    yield "Services", ("what", "figure"), _service_rows(measured, workload)
    compile_head = ("bundle", "whole, by the clock", "each executable, by the clock", "CPU an executable")
    yield "Compiling", compile_head, _compile_rows(measured, workload)


def _title(section: Section) -> str:
    workload = section.workload
    words = [f"{section.num_parameters / 1e6:.0f} M parameters", workload.dtype]
    words += [FORMATS[name].title for name in (workload.format,) if name != PLAIN]
    beside = " and ".join(FORMATS[name].title for name in workload.variants)
    return ", ".join(words) + (f", beside {beside}" if beside else "")


def _introduce(section: Section) -> str:
    workload, shape = section.workload, section.workload.model
    reads = section.measured.reads.get(BARE)
    size = "" if reads is None else f"A decode step reads {reads.weights_bytes / 1e6:.0f} MB of weights.\n"
    return (
        f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, {shape['num_attention_heads']} heads on "
        f"{shape['num_key_value_heads']} KV heads, vocabulary {shape['vocab_size']};\n"
        f"{workload.num_threads} threads for everything, {workload.rounds} rounds. {size}"
        "The limit of a step is its arithmetic at the rate of its unit, or its weights, keys and values at the\n"
        "bandwidth, whichever takes longer."
    )


def _notice(measured: Measurements) -> Iterator[str]:
    """Says whether the machine did other things meanwhile."""
    if not measured.has("others"):
        return
    others, stolen = measured.range("others")[1], measured.range("stolen")[1]
    shares = f"up to {others:.0%} of the processors in a round, other virtual machines up to {stolen:.0%}"
    if max(others, stolen) > MAX_OTHERS:
        yield f"**The machine was busy.** Other processes took {shares}, so that times by the clock are too long."
    else:
        yield f"The machine was idle otherwise: other processes took {shares}."


def _goal_rows(section: Section) -> list[Row]:
    return [
        (
            goal.name,
            "not measured" if goal.figure is None else f"{goal.figure:.2f}",
            f"{'≥' if goal.at_least else '≤'} {goal.goal:g}" + ("" if goal.aim is None else f" (aim: {goal.aim:g})"),
            "yes" if goal.is_met else "**no**",
        )
        for goal in list_goals(section.measured, section.workload, section.num_read)
    ]


def _limit_rows(section: Section) -> list[Row]:
    measured = section.measured
    rows: list[Row] = []
    for name, unit in UNITS.items():
        if measured.has(f"limit.{name}"):
            figures = (f"limit.{name}.alone", f"limit.{name}", f"limit.{name}.thread")
            rows.append((unit.title, *(f"{measured.typical(figure) / 1e9:.1f} {unit.rate}" for figure in figures)))
    return rows


def _engine_rows(section: Section, figure: str, tokens: int) -> list[Row]:
    """One row for each engine: what it takes for something that gives or takes so many tokens."""
    measured = section.measured
    rows: list[Row] = []
    for engine, title in _TITLES.items():
        name = f"{engine}.{figure}"
        if not measured.has(name):
            continue
        bare = f"{BARE}.{figure}"
        relative = f"{measured.relate(truediv, name, bare):.2f}" if measured.has(name, bare) else _NONE
        share = share_of_limit(measured, section.workload, section.num_read, name)
        cpu = f"{measured.typical(f'{name}.cpu') * 1e3:.1f} ms"
        rate = f"{tokens / measured.typical(name):.0f}"
        rows.append(
            (title, _milliseconds(measured, name), rate, cpu, relative, _NONE if share is None else f"{share:.2f}")
        )
    return rows


def _milliseconds(measured: Measurements, name: str) -> str:
    least, greatest = measured.range(name)
    return f"{measured.typical(name) * 1e3:.1f} ms ({least * 1e3:.1f}–{greatest * 1e3:.1f})"


def _latency_rows(section: Section) -> list[Row]:
    measured = section.measured
    return [
        (
            str(batch),
            *(
                f"{measured.percentile(f'{what}.{batch}', percent) * 1e3:.1f}"
                for what in ("first", "gap")
                for percent in (50, 99)
            ),
        )
        for batch in section.workload.batches
        if measured.pools.get(f"gap.{batch}")
    ]


def _describe_crowd(crowd: Crowd) -> str:
    return f"a prompt of {crowd.prompt} tokens ({crowd.chunk} a chunk) among {count_streams(crowd.streams)}"


def _switch_rows(section: Section) -> list[Row]:
    """What each switch changes: milliseconds, medians of rounds."""
    workload, measured = section.workload, section.measured
    figures: dict[str, tuple[str, str]] = {}
    for title, figure in _CROWD_FIGURES.items():
        figures[title] = (f"{CHUNKS}.on.{figure}", f"{CHUNKS}.off.{figure}")
    if (prefix := workload.prefix) is not None:
        title = f"prefix cache: first token of {prefix.shared} shared and {prefix.own} own tokens"
        figures[title] = ("prefix.on", "prefix.off")
    for batch in workload.stepwise:
        title = f"async scheduling: a step of {count_streams(batch)} through gRPC"
        figures[title] = (f"{ASYNC}.on.{batch}", f"{ASYNC}.off.{batch}")
    rows: list[Row] = []
    for title, (on, off) in figures.items():
        if measured.has(on) or measured.has(off):
            times = (_milliseconds(measured, name) if measured.has(name) else _NONE for name in (on, off))
            ratio = f"{measured.relate(truediv, off, on):.2f}" if measured.has(on, off) else _NONE
            rows.append((title, *times, ratio))
    if measured.has("bare.chunk"):
        rows.append(("the last of the chunks by itself, bare", _milliseconds(measured, "bare.chunk"), _NONE, _NONE))
    return rows


def _time_rows(section: Section) -> list[Row]:
    """Whose processor time a step of so many streams takes."""
    measured = section.measured
    rows: list[Row] = []
    for batch in section.workload.batches:
        names = [f"{process}.{batch}" for process in ("rank", "front", "client")]
        if measured.has(*names, f"bare.decode.{batch}.cpu"):
            bare = f"{measured.typical(f'bare.decode.{batch}.cpu') * 1e3:.1f}"
            rows.append((str(batch), bare, *(f"{measured.typical(name) * batch * 1e3:.1f}" for name in names)))
    return rows


def _service_rows(measured: Measurements, workload: Workload) -> list[Row]:
    rows: list[Row] = [
        (title, f"{measured.once[name]:.2f} s") for name, title in _LOADS.items() if name in measured.once
    ]
    if measured.has("pause"):
        rows.append(("LoadWeights pause", f"{measured.typical('pause') * 1e3:.2f} ms"))
    for name, title in _RAW_STREAMS.items():
        if measured.has(name):
            rows.append((title, f"{measured.typical(name) * 1e6:.0f} µs"))
    for batch in workload.batches:
        name = f"front.{batch}"
        if measured.has(name, *_RAW_STREAMS):
            times = [measured.relate(truediv, name, raw) for raw in _RAW_STREAMS]
            figure = f"{measured.typical(name) * 1e6:.0f} µs ({times[0]:.1f}× raw, {times[1]:.1f}× raw at that pace)"
            rows.append((f"front, CPU a token, {count_streams(batch)}", figure))
    return rows


def _compile_rows(measured: Measurements, workload: Workload) -> list[Row]:
    """Lowerings run beside each other, so that their times by the clock overlap."""
    rows: list[Row] = []
    for name in workload.bundles:
        lowered = {
            figure.rpartition(".")[2]: seconds
            for figure, seconds in measured.once.items()
            if figure.startswith(f"lower.{name}.")
        }
        if lowered:
            each = ", ".join(f"{tag} {seconds:.1f} s" for tag, seconds in lowered.items())
            cpu_s = measured.once[f"compile.{name}.cpu"] / len(lowered)
            rows.append((name, f"{measured.once[f'compile.{name}']:.1f} s", each, f"{cpu_s:.1f} s"))
    return rows


def _profiles(measured: Measurements) -> str:
    profiles = measured.profiles
    if not any(profiles.values()):
        return "Not known: this host has no `perf`."
    kinds = {what: max(one.get(what, 0.0) for one in profiles.values()) for one in profiles.values() for what in one}
    rows: list[Row] = [
        (what, *(f"{one.get(what, 0.0):.1%}" for one in profiles.values()))
        for what, share in sorted(kinds.items(), key=lambda item: -item[1])
        if share >= 0.002
    ]
    return "Shares of both threads' time.\n\n" + render_table(("what", *profiles), rows)
