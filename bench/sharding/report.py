"""Renders the measurements of sharding as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bench.machine import describe_machine
from bench.other_load import MAX_OTHERS, Shares
from bench.tables import render_table
from execution.threads import count_processors

#: Of the plain loop's rate.
MIN_RATE: Final = 0.6
#: Of a shard, beside the largest tensor.
MAX_SHARDS: Final = 1.5


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one process did. A killed one tells its time and what others saw of its memory, and nothing else.

    Attributes:
        peak_bytes: Largest resident memory.
        anonymous_bytes: Largest anonymous memory that was seen at intervals.
        mapped_bytes: Largest memory of mapped files that was seen at intervals.
        read_bytes: From disks.
        written_bytes: To disks, as far as they had been written when the process ended.
    """

    wall_s: float
    anonymous_bytes: int
    mapped_bytes: int
    shares: Shares
    cpu_s: float | None = None
    peak_bytes: int | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None


def render(*, size_bytes: float, largest_bytes: int, num_ranks: int, num_finished: int, runs: Mapping[str, Run]) -> str:
    """Renders the page in Markdown.

    Args:
        size_bytes: Of the checkpoint's tensors.
        largest_bytes: Of its largest tensor.
        num_finished: Ranks that the killed process had finished.
        runs: By name; the first is the plain loop, the second the undisturbed one.
    """
    plain, whole, *_ = runs.values()
    assert plain.cpu_s is not None
    assert whole.cpu_s is not None
    assert whole.peak_bytes is not None
    shard_bytes = size_bytes / num_ranks
    limit_bytes = MAX_SHARDS * shard_bytes + largest_bytes
    rate, cpu_rate = plain.wall_s / whole.wall_s, plain.cpu_s / whole.cpu_s
    rows = [
        (
            name,
            f"{run.wall_s:.1f}",
            _number(run.cpu_s, 1, 1),
            _number(run.read_bytes, 1e9, 1),
            _number(run.written_bytes, 1e9, 1),
            _number(run.peak_bytes, 1e6, 0),
            f"{run.anonymous_bytes / 1e6:.0f}",
            f"{run.mapped_bytes / 1e6:.0f}",
            f"{run.shares.others:.0%}",
        )
        for name, run in runs.items()
    ]
    head = (
        "way",
        "seconds",
        "processor seconds",
        "GB from the disk",
        "GB to the disk",
        "peak resident, MB",
        "anonymous",
        "mapped files",
        "other load",
    )
    goals = [
        (
            f"rate of the plain loop, at least {MIN_RATE}",
            f"{rate:.2f} on the clock, {cpu_rate:.2f} by processor time",
            _judge(is_met=rate >= MIN_RATE),
        ),
        (
            f"resident memory, below {MAX_SHARDS} shards and the largest tensor: {limit_bytes / 1e6:.0f} MB",
            f"{whole.peak_bytes / 1e6:.0f} MB",
            _judge(is_met=whole.peak_bytes < limit_bytes),
        ),
    ]
    return (
        "# Writing shards\n\n"
        f"Written by `python -m bench.sharding`. A bfloat16 Llama of the 8 B model's shape, {size_bytes / 1e9:.1f} GB, "
        f"for {num_ranks} ranks: shards of {shard_bytes / 1e6:.0f} MB,\nlargest tensor {largest_bytes / 1e6:.0f} MB. "
        "The plain loop reads the files, hashes each byte once, and writes it, in as many threads "
        f"({count_processors()}).\nBoth make their files durable, and begin with a checkpoint that the page cache does "
        "not hold.\n\n"
        f"Machine: {describe_machine()}. A section with other load above {MAX_OTHERS:.0%} was not measured on an idle "
        "machine.\n\n"
        f"{render_table(head, rows)}\n\n"
        "Resident memory is that of the one process that reads, cuts, hashes and writes: anonymous memory and touched "
        "pages of mapped files, those\nof Python and torch included (the peaks of the two were seen at intervals, and "
        "at different times). The kernel's page cache is not in it.\n"
        f"The killed process got SIGKILL when {num_finished} of {num_ranks} ranks were recorded. The resumed one read "
        "these shards to verify their\ndigests, wrote the others, and left the same shards as the undisturbed one.\n\n"
        f"{render_table(('goal', 'measured', ''), goals)}\n"
    )


def _number(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"


def _judge(*, is_met: bool) -> str:
    return "met" if is_met else "**missed**"
