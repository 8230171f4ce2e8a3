"""The view of a plan for people: bars of memory, tables of submodels and executables, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from kiln.compiler.v1.compiler_pb2 import GraphCheck, PlanCompileResponse, RankPlan
from rich.console import Group, RenderableType
from rich.text import Text

from kiln_client.cli.rows import Row, describe, format_binary, pairs, table, tabulate

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

_WEIGHTS, *_OTHERS = (Row(name, f"{{{field}:binary}}") for name, field, _, _ in _PARTS)
_GROUP: Final = Row("  {name}", "{size_bytes:binary}", needs="size_bytes")
_KEPT: Final = Row("{kind} kept as", "{format}: {size_bytes:binary} of each rank")
_SUBMODELS: Final = (
    Row("submodel", "{name}"),
    Row("batch", "{batch}"),
    Row("buckets", lambda submodel: ", ".join("x".join(map(str, one.tokens)) for one in submodel.buckets)),
)
_EXECUTABLES: Final = (Row("executable", "{tag}"), Row("cache", "{cache}"))
_HINT: Final = Row("ignored", "{field} {value}: {reason}")
_FINDING: Final = Row("refused", "{tag}: {beginning}{operation}{place}; accepted: {accepted}")
_GRAPHS: Final = Row("graphs", "{num_graphs} checked for what Neuron's compiler refuses; findings: {num_findings}")
_COST: Final = Row("cost", "about {duration:.0f} s{memory}, as {num_records} recorded lowerings took")


def plan_view(plan: PlanCompileResponse, target: str) -> RenderableType:
    """Shows a plan as text, bars and tables."""
    parts = [
        _bars(plan),
        _memory(plan.ranks[0]),
        tabulate(plan.submodels, _SUBMODELS),
        tabulate(plan.executables, _EXECUTABLES),
    ]
    if notes := [*_notes(plan)]:
        parts.append(pairs(notes))
    return Group(*(shown for part in parts for shown in (part, Text())), _verdict(plan, target))


def _verdict(plan: PlanCompileResponse, target: str) -> Text:
    largest = plan.largest
    names = ("batch_size", "seq_len", "pa_num_blocks")
    sizes = [f"{name} {size}" for name in names if (size := getattr(largest, name))]
    if plan.fits:
        rank = max(plan.ranks, key=_total)
        told = f"fits: {format_binary(_total(rank))} of {format_binary(rank.limit_bytes)} a core"
        return Text(f"{told}; up to {', or '.join(sizes)}", style="bold green")
    steps = [f"needs {plan.cores_needed} cores" if plan.cores_needed else f"fits on no number of {target} cores"]
    steps += [f"with {size} it fits" for size in sizes]
    return Text(f"does not fit: {'; '.join(steps)}", style="bold red")


def _bars(plan: PlanCompileResponse) -> RenderableType:
    """Draws one bar for each run of ranks with equal memory."""
    grid = pairs(())
    grid.add_column()
    for (total, limit), alike in groupby(plan.ranks, key=lambda rank: (_total(rank), rank.limit_bytes)):
        ranks = list(alike)
        name = f"rank {ranks[0].rank}" if len(ranks) == 1 else f"ranks {ranks[0].rank}–{ranks[-1].rank}"
        share = f"{total / limit:.0%}" if limit else ""
        told = f"{format_binary(total)} of {format_binary(limit)}, {share}"
        grid.add_row(Text(name), _bar(ranks[0]), Text(told))
    legend = Text("  ").join(Text(f"{sign} {name}", style=colour) for name, _, sign, colour in _PARTS)
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


def _memory(rank: RankPlan) -> RenderableType:
    groups = (line for group in rank.weight_groups for line in describe(group, [_GROUP]))
    return table(("of each rank", "memory"), [*describe(rank, [_WEIGHTS]), *groups, *describe(rank, _OTHERS)])


def _notes(plan: PlanCompileResponse) -> Iterator[tuple[str, str]]:
    for kind, kept in (("weights", plan.ranks[0].kept_weights), ("KV cache", plan.ranks[0].kept_kv)):
        for one in kept:
            yield from describe(one, [_KEPT], kind=kind)
    yield from (("warning", text) for text in plan.warnings)
    for hint in plan.hints:
        yield from describe(hint, [_HINT])
    if plan.HasField("graph_check"):
        yield from _describe_graphs(plan.graph_check)
    if plan.HasField("cost"):
        peak_bytes = plan.cost.peak_memory_bytes
        memory = f", {format_binary(peak_bytes)} for a lowering" if peak_bytes else ""
        yield from describe(plan.cost, [_COST], memory=memory)


def _describe_graphs(check: GraphCheck) -> Iterator[tuple[str, str]]:
    for one in check.findings:
        beginning = f"{one.code}: " if one.code else ""
        yield from describe(one, [_FINDING], beginning=beginning, place=f" at {one.source}" if one.source else "")
    if (more := check.num_findings - len(check.findings)) > 0:
        yield "refused", f"{more} more"
    yield from describe(check, [_GRAPHS])


def _total(rank: RankPlan) -> int:
    return int(sum(getattr(rank, field) for _, field, _, _ in _PARTS))
