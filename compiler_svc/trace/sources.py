"""Finds an operation's source line in this package, as torch records it during an export."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from torch.fx import Node
from torch.fx.proxy import TracerBase

ROOT: Final = Path(__file__).parents[2]
#: The folders whose lines are kept: they define models and sampling.
FOLDERS: Final = tuple(str(ROOT / folder) + "/" for folder in ("compiler_svc", "execution"))

# The format of a frame in `traceback`.
_FRAME: Final = re.compile(r'^ *File "(?P<path>.+)", line (?P<line>\d+), in ', re.MULTILINE)


class Source(NamedTuple):
    """A line of code, from 1, in a file relative to the installation, such as `compiler_svc/models/rope.py`."""

    file: str
    line: int


@contextmanager
def recorded_sources() -> Iterator[None]:
    """Makes torch record for each operation the lines of our own sources that led to it.

    By default torch records only lines of `forward` methods, but most of our operations come from functions that these
    call. Replaces the tracer's hook and restores it afterwards. Only one thread may use it at a time.
    """
    before = TracerBase._filter_traceback_frames  # noqa: SLF001 - made to be overridden, but for tracers of one's own

    def keep_own_frames(_tracer: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([one for one in frames if one.filename.startswith(FOLDERS)])

    TracerBase._filter_traceback_frames = keep_own_frames  # type: ignore[method-assign,assignment]  # noqa: SLF001
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = before  # type: ignore[method-assign]  # noqa: SLF001


def find_source(node: Node) -> Source | None:
    """Finds the innermost of our own lines that led to an operation; None for inputs, and if torch recorded none."""
    found = None
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        if frame["path"].startswith(FOLDERS):
            found = Source(str(Path(frame["path"]).relative_to(ROOT)), int(frame["line"]))
    return found
