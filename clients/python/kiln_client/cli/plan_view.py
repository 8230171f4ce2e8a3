"""The view of a plan for people: bars of memory, tables of submodels and executables, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kiln.compiler.v1.compiler_pb2 import CacheResult, PlanCompileResponse, RankPlan
from rich.console import Group, RenderableType
from rich.text import Text

from kiln_client.cli.views import pairs, rows
from kiln_client.enums import enum_name

_BAR_WIDTH = 40
#: Parts of a rank's memory: name, field, sign, colour.
_PARTS = (
    ("weights", "weights_bytes", "█", "blue"),
    ("KV cache", "kv_bytes", "▓", "green"),
    ("activations", "activation_bytes", "▒", "yellow"),
    ("LoRA", "lora_bytes", "◆", "magenta"),
    ("code", "code_bytes", "░", "cyan"),
)
_FREE = "·"
_EXCESS = "!"


def plan_view(plan: PlanCompileResponse, target: str) -> RenderableType:
    """Shows a plan as text, bars and tables."""
    parts: list[RenderableType] = [_bars(plan), Text(), _memory(plan), Text()]
    parts += [_submodels(plan), Text(), _executables(plan)]
    notes = [*(("warning", text) for text in plan.warnings), *_hints(plan), *_graphs(plan), *_cost(plan)]
    if notes:
        parts += [Text(), pairs(notes)]
    return Group(*parts, Text(), verdict(plan, target))


def verdict(plan: PlanCompileResponse, target: str) -> Text:
    """Says in one sentence whether the plan fits, and what to do next."""
    largest = plan.largest
    sizes = [("batch_size", largest.batch_size), ("seq_len", largest.seq_len)]
    if largest.pa_num_blocks:
        sizes.append(("pa_num_blocks", largest.pa_num_blocks))
    if plan.fits:
        rank = max(plan.ranks, key=_total)
        reach = ", or ".join(f"{name} {size}" for name, size in sizes if size)
        told = f"fits: {_size(_total(rank))} of {_size(rank.limit_bytes)} a core; up to {reach}"
        return Text(told, style="bold green")
    steps = [f"needs {plan.cores_needed} cores" if plan.cores_needed else f"fits on no number of {target} cores"]
    steps += [f"with {name} {size} it fits" for name, size in sizes if size]
    return Text(f"does not fit: {'; '.join(steps)}", style="bold red")


def _bars(plan: PlanCompileResponse) -> RenderableType:
    """Draws one bar for each run of ranks with equal memory."""
    lines = []
    for _, alike in groupby(plan.ranks, key=lambda rank: (_total(rank), rank.limit_bytes)):
        ranks = list(alike)
        name = f"rank {ranks[0].rank}" if len(ranks) == 1 else f"ranks {ranks[0].rank}–{ranks[-1].rank}"
        total, limit = _total(ranks[0]), ranks[0].limit_bytes
        share = f"{total / limit:.0%}" if limit else ""
        lines.append((name, _bar(ranks[0]), f"{_size(total)} of {_size(limit)}, {share}"))
    legend = Text("  ").join(Text(f"{sign} {name}", style=colour) for name, _, sign, colour in _PARTS)
    grid = pairs(())
    grid.add_column()
    for name, bar, told in lines:
        grid.add_row(Text(name), bar, Text(told))
    grid.add_row(Text(), legend, Text())
    return grid


def _bar(rank: RankPlan) -> Text:
    """Draws the parts of a rank's memory to the scale of its limit, and marks the excess."""
    scale = max(_total(rank), rank.limit_bytes, 1)
    bar, cells, seen = Text(), 0, 0
    for _, field, sign, colour in _PARTS:
        seen += getattr(rank, field)
        end = round(_BAR_WIDTH * seen / scale)
        bar.append(sign * (end - cells), style=colour)
        cells = end
    bar.append(_FREE * (_BAR_WIDTH - cells), style="dim")
    if _total(rank) <= rank.limit_bytes:
        return bar
    allowed = round(_BAR_WIDTH * rank.limit_bytes / scale)
    return Text.assemble(bar[:allowed], (_EXCESS * (_BAR_WIDTH - allowed), "bold red"))


def _memory(plan: PlanCompileResponse) -> RenderableType:
    rank = plan.ranks[0]
    lines = [(name, _size(getattr(rank, field))) for name, field, _, _ in _PARTS]
    groups = [(f"  {group.name}", _size(group.size_bytes)) for group in rank.weight_groups if group.size_bytes]
    return rows(("of each rank", "memory"), [lines[0], *groups, *lines[1:]])


def _submodels(plan: PlanCompileResponse) -> RenderableType:
    return rows(
        ("submodel", "batch", "buckets"),
        (
            (submodel.name, submodel.batch, ", ".join("x".join(map(str, one.tokens)) for one in submodel.buckets))
            for submodel in plan.submodels
        ),
    )


def _executables(plan: PlanCompileResponse) -> RenderableType:
    return rows(
        ("executable", "cache"),
        ((one.tag, enum_name(CacheResult.DESCRIPTOR, one.cache)) for one in plan.executables),
    )


def _hints(plan: PlanCompileResponse) -> Iterator[tuple[str, str]]:
    for hint in plan.hints:
        yield "ignored", f"{hint.field} {hint.value}: {hint.reason}"


def _graphs(plan: PlanCompileResponse) -> Iterator[tuple[str, str]]:
    """Tells what the check of graphs found, if it ran."""
    if not plan.HasField("graph_check"):
        return
    check = plan.graph_check
    for one in check.findings:
        code = f"{one.code}: " if one.code else ""
        place = f" at {one.source}" if one.source else ""
        yield "refused", f"{one.tag}: {code}{one.operation}{place}; accepted: {one.accepted}"
    if (more := check.num_findings - len(check.findings)) > 0:
        yield "refused", f"{more} more"
    yield "graphs", f"{check.num_graphs} checked for what Neuron's compiler refuses; findings: {check.num_findings}"


def _cost(plan: PlanCompileResponse) -> Iterator[tuple[str, str]]:
    if plan.HasField("cost"):
        seconds = plan.cost.duration.ToTimedelta().total_seconds()
        memory = f", {_size(plan.cost.peak_memory_bytes)} for a lowering" if plan.cost.peak_memory_bytes else ""
        yield "cost", f"about {seconds:.0f} s{memory}, as {plan.cost.num_records} recorded lowerings took"


def _total(rank: RankPlan) -> int:
    return int(sum(getattr(rank, field) for _, field, _, _ in _PARTS))


def _size(size_bytes: int) -> str:
    """Formats a size in binary units."""
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
