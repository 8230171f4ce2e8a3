"""An interrupted full run continues, and its page says what passed."""

from __future__ import annotations

from pathlib import Path

from tests.parity.cases import all_cases
from tests.parity.record import BEGIN, END, ParityRecord, ParityResult, write_results

RESULT = ParityResult("gqa4-tied-llama3-tp2-o1", 3.2e-7, 640, 1)


def test_results_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert ParityRecord(path).passed() == frozenset()
    ParityRecord(path).add(RESULT)
    path.write_text(path.read_text() + '{"case": "cut sho')
    assert ParityRecord(path).results() == {RESULT.case: RESULT}


def test_page_shows_what_passed() -> None:
    page = write_results(f"# Models\n{BEGIN}\nold\n{END}\nmore\n", [RESULT], "abc1234")
    assert page.startswith(f"# Models\n{BEGIN}\n\nCommit")
    assert page.endswith(f"{END}\nmore\n")
    assert "old" not in page
    assert f"Commit abc1234: 1 of {len(all_cases())} cases have run and passed" in page
    assert "| Llama | gqa4-tied-llama3 | 8 | 2 | llama3 | yes | – | 3.2e-07 (1 of 3) | – |" in page
    assert "Greedy tokens compared: 640. Comparisons that ended in a tie: 1." in page
