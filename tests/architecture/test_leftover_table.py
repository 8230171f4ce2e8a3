"""The table of leftovers is of processes that its page knows and that the matrix of kills has."""

from __future__ import annotations

import re

from tests.architecture.leftover_table import PAGE
from tests.leftovers import DESCRIPTORS, KEPT, LEFTOVERS, PLACES
from tests.system.kills.compiler_matrix import COMPILER_KILLS, OPERATION
from tests.system.kills.runtime_matrix import EVERYONE, RUNTIME_KILLS

#: Programs that a lowering runs, for which its row speaks, and victims that are no process.
FOREIGN = {"cc1plus", OPERATION, EVERYONE}


def named_processes() -> set[str]:
    """The processes of the table at the head of the page, by the names that the matrix gives them."""
    table = PAGE.read_text().partition("# Processes")[2].partition("\n\n`kiln serve")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    return {name[0] if (name := re.findall(r"`(kiln-[^`]+)`", row)) else row.strip() for row in rows}


def test_rows_name_known_processes_and_places() -> None:
    processes = {name for row in LEFTOVERS for name in row.processes} | {
        name for row in DESCRIPTORS for name in row.holders
    }
    assert processes <= named_processes()
    assert {row.place for row in LEFTOVERS} <= set(PLACES) == set(KEPT)


def test_every_process_is_killed_in_the_matrix() -> None:
    """A new process needs rows in the matrix, and what it leaves needs rows in the table."""
    victims = set().union(*(kill.victims for kill in (*COMPILER_KILLS, *RUNTIME_KILLS)))
    killed = {re.sub(r"kiln-rank-\d", "kiln-rank-N", victim) for victim in victims}
    assert killed - FOREIGN == named_processes()


def test_the_matrices_have_110_rows() -> None:
    kills = (*COMPILER_KILLS, *RUNTIME_KILLS)
    assert len({str(kill) for kill in kills}) == len(kills) >= 110
