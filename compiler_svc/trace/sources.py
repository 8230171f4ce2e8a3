"""Where an operation's code is: lines of this package's own sources, as torch notes them while it exports."""

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
#: The folders whose lines are kept: what defines models and samples their tokens.
FOLDERS: Final = tuple(str(ROOT / folder) + "/" for folder in ("compiler_svc", "execution"))

# As `traceback` formats a frame.
_FRAME: Final = re.compile(r'^ *File "(?P<path>.+)", line (?P<line>\d+), in ', re.MULTILINE)


class Source(NamedTuple):
    """A line of code.

    Attributes:
        file: Relative to the installation, such as `compiler_svc/models/rope.py`.
        line: From 1.
    """

    file: str
    line: int


@contextmanager
def recorded_sources() -> Iterator[None]:
    """Has torch note for each operation the lines of our own sources that led to it.

    By itself it notes those of `forward` methods only, and most of our operations are made by functions that these
    call. The hook is the tracer's own, and put back afterwards; one thread at a time.
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
    """The innermost of our own lines that led to an operation; None for inputs, and where nothing was recorded."""
    found = None
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        if frame["path"].startswith(FOLDERS):
            found = Source(str(Path(frame["path"]).relative_to(ROOT)), int(frame["line"]))
    return found
