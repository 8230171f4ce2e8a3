"""Which slow test files a run takes, and in which order: first those whose rooms changed, then the others by turns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Set
from pathlib import PurePosixPath
from typing import Final

from tests.repository import ROOT
from tests.turns.record import FileResult, expect_seconds, last_runs

#: Where nothing is known of earlier runs, a file's turn is every fifth day.
NUM_TURNS: Final = 5
#: A turn: a file that takes longer runs by itself only.
TURN_S: Final = 1200.0

_FAMILIES: Final = ("compiler_svc/models", "compiler_svc/trace", "execution/attention")

#: Test files that mirror no folder of sources, by the beginning of their path → sources that they watch.
WATCHED: Final = {
    "tests/contract/changing_files/": ("bundle", "compiler_svc/weights", "edge/access", "runtime_svc/bundles"),
    "tests/contract/executors/": ("compiler_svc/lower", "execution/executors"),
    "tests/contract/families/": _FAMILIES,
    "tests/parity/": (*_FAMILIES, "compiler_svc/sharding", "execution/ranks", "runtime_svc/engine"),
    "tests/service/turns/": ("tests/turns",),
    "tests/system/builds/": ("compiler_svc/builds", "compiler_svc/sharding", "compiler_svc/weights"),
    "tests/system/fuzz/": ("protos", "edge", "compiler_svc/api", "compiler_svc/config", "runtime_svc/api"),
    "tests/system/gateway/": ("clients/python/kiln_client/stack", "runtime_svc/text", "runtime_svc/vllm_engine"),
    "tests/system/kills/test_build_kills.py": ("bundle", "compiler_svc/builds", "compiler_svc/compiles"),
    "tests/system/kills/test_compiler_kills.py": ("bundle", "compiler_svc/bundles", "compiler_svc/planning"),
    "tests/system/kills/test_killed_imports.py": ("bundle", "compiler_svc/bundles", "compiler_svc/database"),
    "tests/system/kills/test_lowering_kills.py": ("compiler_svc/builds", "compiler_svc/lower"),
    "tests/system/kills/test_quarantine.py": ("runtime_svc/deployments",),
    "tests/system/kills/test_runtime_kills.py": ("execution/ranks", "runtime_svc/deployments", "runtime_svc/engine"),
    "tests/system/test_attributes.py": (*_FAMILIES, "compiler_svc/config"),
    "tests/system/test_batch_mates.py": ("compiler_svc/lower", "execution", "runtime_svc/engine"),
    "tests/system/test_constraints.py": ("execution/text", "runtime_svc/engine", "runtime_svc/text"),
    "tests/system/test_deployments.py": ("runtime_svc/bundles", "runtime_svc/deployments"),
    "tests/system/test_interchange.py": ("compiler_svc/config",),
    "tests/system/test_many_adapters.py": ("compiler_svc/adapters", "runtime_svc/engine", "execution"),
    "tests/system/test_long_context.py": ("compiler_svc/planning", "compiler_svc/lower", "execution/attention"),
    "tests/system/test_plans.py": ("compiler_svc/planning", "execution/ranks"),
    "tests/system/test_serving.py": ("edge", "runtime_svc"),
    "tests/system/test_several_sequences.py": ("runtime_svc/engine", "execution/ranks"),
    "tests/system/test_soak.py": ("tests/soak", "runtime_svc", "execution"),
    "tests/system/test_text_of_image_models.py": ("compiler_svc/models", "compiler_svc/weights"),
    "tests/system/test_tool_choices.py": ("execution/text", "runtime_svc/admission", "runtime_svc/text"),
    "tests/system/deploy/": ("deploy", "docker-compose.yml"),
}


def choose_files(
    files: Iterable[str],
    results: Sequence[FileResult],
    touched: Set[str],
    *,
    day: int,
    budget_s: float,
) -> list[str]:
    """Files whose times add up to the budget at most: what a change touched, what failed, then what waited longest.

    Args:
        results: Of earlier runs. If no file has run whole, as where CI keeps nothing, the day decides.
        day: A number that grows by one each day.
        budget_s: Seconds, of all workers together.
    """
    last = last_runs(results)
    failed = {file for file, result in last.items() if result.has_failed}

    def rank(file: str) -> tuple[bool, bool, str, int]:
        return file not in touched, file not in failed, last[file].ended if file in last else "", days_until(file, day)

    turns = (file for file in files if last or file in touched or days_until(file, day) == 0)
    chosen = []
    for file in sorted(turns, key=rank):
        needed_s = expect_seconds(file, results)
        if needed_s <= min(budget_s, TURN_S):
            chosen.append(file)
            budget_s -= needed_s
    return chosen


def days_until(file: str, day: int) -> int:
    """Days until a file's turn, which is the same in every process, and for ever."""
    return (int.from_bytes(hashlib.sha256(file.encode()).digest()[:4]) - day) % NUM_TURNS


def sources_of(file: str) -> tuple[str, ...]:
    """What a test file watches: the row of the table, else the folder that its own folder mirrors, if there is one."""
    for beginning, sources in WATCHED.items():
        if file.startswith(beginning):
            return sources
    _, _, *folders = PurePosixPath(file).parent.parts
    while folders:
        if (ROOT / "/".join(folders)).is_dir():
            return ("/".join(folders),)
        folders.pop()
    return ()


def find_touched(files: Iterable[str], changed: Iterable[str]) -> set[str]:
    """Those of the test files that changed themselves, or have beside them what changed, or watch it."""
    paths = [PurePosixPath(path) for path in changed]
    return {file for file in files if any(_is_touched(PurePosixPath(file), path) for path in paths)}


def _is_touched(file: PurePosixPath, changed: PurePosixPath) -> bool:
    if changed.parent == file.parent:
        return changed == file or not changed.name.startswith("test_")
    return any(changed.is_relative_to(source) for source in sources_of(str(file)))
