"""Whatever others do to files, and whenever, who reads them ends with a named error, or reads what was there.

`make test` lets one change happen before each call of the operating system in turn, and tries the other changes at that
call in the long run only. The race loops of the long run change files in a thread, at any time; KILN_RACE_S is how many
seconds each takes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Final

import pytest

from bundle.errors import KilnError
from tests.contract.changing_files.mutations import MUTATIONS, restore
from tests.contract.changing_files.readers import READERS

RACE_S: Final = float(os.environ.get("KILN_RACE_S", "0.3"))
#: Calls that `make test` tries of each reader.
MAX_CALLS: Final = 40
#: A superuser may read everything.
CHANGES: Final = [name for name in MUTATIONS if name != "forbid" or os.geteuid()]
_MODULES: Final = {"posix", "io", "_io", "fcntl"}


@contextmanager
def before_calls(act: Callable[[], object]) -> Iterator[None]:
    """Acts before each call of the operating system that deals with files, in this thread and in those that start."""

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and (
            getattr(argument, "__module__", "") in _MODULES
            or type(getattr(argument, "__self__", None)).__name__ == "DirEntry"
        ):
            act()

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Scene:
    """Files, a reader of them, and what else happens while it reads."""

    def __init__(self, reader: str, path: Path) -> None:
        self.read, self.root, self.whole = READERS[reader].read, path / "root", path / "whole"
        READERS[reader].make(self.whole)
        self.restore()
        # Modules are loaded, databases opened.
        self.read(self.root)

    def restore(self) -> None:
        restore(self.root, self.whole)

    def count_calls(self) -> int:
        calls: list[None] = []
        self.restore()
        with before_calls(lambda: calls.append(None)):
            self.read(self.root)
        return len(calls)

    def read_changed(self, change: str, at_call: int) -> None:
        """Reads; the change happens before a call of the operating system, counted from 0."""
        numbers = iter(range(at_call + 1))

        def act() -> None:
            if next(numbers, None) == at_call:
                MUTATIONS[change](self.root, self.whole)

        self.restore()
        try:
            with before_calls(act):
                self.read(self.root)
        except KilnError:
            pass
        except Exception as error:
            raise AssertionError(f"{change} before call {at_call}: {error!r}") from error


@pytest.mark.parametrize("reader", READERS)
def test_a_change_at_any_time_is_a_named_error(reader: str, tmp_path: Path) -> None:
    scene = Scene(reader, tmp_path)
    num_calls = scene.count_calls()
    assert num_calls
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    step = max(1, num_calls // MAX_CALLS)
    for number, at_call in enumerate(range(0, num_calls, step)):
        scene.read_changed(CHANGES[number % len(CHANGES)], at_call)
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_files


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reader", READERS)
def test_every_change_before_every_call_is_a_named_error(reader: str, change: str, tmp_path: Path) -> None:
    scene = Scene(reader, tmp_path)
    for at_call in range(scene.count_calls()):
        scene.read_changed(change, at_call)


@pytest.mark.slow
@pytest.mark.timeout(300 + RACE_S)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reader", READERS)
def test_a_race_ends_in_named_errors(
    reader: str, change: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    scene = Scene(reader, tmp_path)
    end_s = monotonic() + RACE_S
    outcomes: Counter[str] = Counter()

    def change_on() -> None:
        while monotonic() < end_s:
            # The collection writes, too, where this removes.
            with suppress(OSError):
                MUTATIONS[change](scene.root, scene.whole)
            with suppress(OSError):
                scene.restore()

    changing = threading.Thread(target=change_on)
    changing.start()
    try:
        while monotonic() < end_s:
            try:
                scene.read(scene.root)
                outcomes["read"] += 1
            except KilnError as error:
                outcomes[error.reason] += 1
    finally:
        end_s = 0.0
        changing.join()
    record_property("outcomes", dict(outcomes))
    assert outcomes
