"""Results of a full run: one JSON line for each case, and the table of `docs/models.md` that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.parity.cases import DEGREES, LEVELS, all_cases
from tests.parity.geometries import ARCHITECTURES, GEOMETRIES, count_kv_heads, find_rope_type

#: Names the file of a run that is continued.
RECORD_VARIABLE: Final = "KILN_PARITY_RECORD"
#: What stands between these lines of the page is written by a full run.
BEGIN, END = "<!-- results of make test-full -->", "<!-- end of the results -->"

_INTRODUCTION = """\
Commit {commit}: {passed} of {total} cases have run and passed. A figure is the largest deviation of a logit over
{degrees} ranks, as a share of the largest reference logit; the limit is 1e-4.
"""


@dataclass(frozen=True)
class ParityResult:
    """What one passed case measured.

    Attributes:
        max_deviation: Largest deviation of a logit, as a share of the largest reference logit.
        num_tokens: Greedy tokens that were compared.
        num_ties: Comparisons that ended in a tie of the reference.
    """

    case: str
    max_deviation: float
    num_tokens: int
    num_ties: int


class ParityRecord:
    """An append-only file of results, of one state of the sources."""

    def __init__(self, path: Path) -> None:
        """Takes the file, which need not exist."""
        self._path = path

    def add(self, result: ParityResult) -> None:
        """Appends a result."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def results(self) -> dict[str, ParityResult]:
        """Results by case. A line that a kill cut short is none."""
        results = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                result = ParityResult(**json.loads(line))
            except (ValueError, TypeError):
                continue
            results[result.case] = result
        return results

    def passed(self) -> frozenset[str]:
        """Names of the cases that have passed."""
        return frozenset(self.results())


def write_results(page: str, results: Iterable[ParityResult], commit: str) -> str:
    """The page with the results of a run in place of those that it has."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render_results(results, commit)}\n{END}{after}"


def render_results(results: Iterable[ParityResult], commit: str) -> str:
    """A table with one row for each geometry, one column for each level."""
    by_case = {result.case: result for result in results}
    total = len(list(all_cases()))
    degrees = ", ".join(map(str, DEGREES))
    columns = ["family", "geometry", "heads", "KV heads", "rope", "tied", *(f"-O{level}" for level in LEVELS)]
    lines = [
        _INTRODUCTION.format(commit=commit, passed=len(by_case), total=total, degrees=degrees),
        _row(columns),
        "|---" * len(columns) + "|",
    ]
    for geometry, config in GEOMETRIES.items():
        cells = [
            ARCHITECTURES[geometry].removesuffix("ForCausalLM"),
            geometry,
            config["num_attention_heads"],
            count_kv_heads(config),
            find_rope_type(config),
            "yes" if config["tie_word_embeddings"] else "no",
            *(_figure([by_case.get(f"{geometry}-tp{degree}-o{level}") for degree in DEGREES]) for level in LEVELS),
        ]
        lines.append(_row(cells))
    num_tokens = sum(result.num_tokens for result in by_case.values())
    num_ties = sum(result.num_ties for result in by_case.values())
    lines += ["", f"Greedy tokens compared: {num_tokens}. Comparisons that ended in a tie: {num_ties}.", ""]
    return "\n".join(lines)


def _figure(results: Sequence[ParityResult | None]) -> str:
    """The largest deviation over the degrees, and how many passed if not all did."""
    passed = [result.max_deviation for result in results if result is not None]
    if not passed:
        return "–"
    return f"{max(passed):.1e}" + ("" if len(passed) == len(results) else f" ({len(passed)} of {len(results)})")


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
