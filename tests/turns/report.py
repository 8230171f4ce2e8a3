"""What is known of slow and flaky tests, for `make test-report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.turns.choice import TURN_S
from tests.turns.record import FileResult, FlakyTest, expect_seconds, last_runs


def render_report(files: Sequence[str], results: Sequence[FileResult], flaky: Sequence[FlakyTest], parity: str) -> str:
    """Files by what they came to when they last ran; flaky tests, the most frequent ones first; the matrix."""
    last = last_runs(results)
    states = {
        "Failed when they last ran": lambda file: file in last and last[file].has_failed,
        "Never ran": lambda file: file not in last,
        "Too long for a turn": lambda file: expect_seconds(file, results) > TURN_S,
        "Passed when they last ran": lambda file: file in last and not last[file].has_failed,
    }
    blocks = [render_rows(state, filter(is_in, files), last) for state, is_in in states.items()]
    counts, newest = Counter(one.test for one in flaky), {one.test: one for one in flaky}
    rows = [f"  {newest[test].ended}  {newest[test].commit:12} {num:3}  {test}\n" for test, num in counts.most_common()]
    return "".join(
        [*blocks, f"\nFlaky, last time and number: {len(rows)}\n", *rows, f"\nParity: {parity} cases have passed\n"]
    )


def render_rows(title: str, files: Iterable[str], results: Mapping[str, FileResult]) -> str:
    """A row for each file: when it ended, at which commit, how long it took, and its result."""
    rows = [f"  {_render_row(file, results.get(file))}\n" for file in files]
    return f"\n{title}: {len(rows)}\n{''.join(rows)}"


def _render_row(file: str, result: FileResult | None) -> str:
    if result is None:
        return file
    return f"{result.ended}  {result.commit:12} {result.seconds:7.1f} s  {file}  {result.summary}"
