"""Which files the interpreter opens, seen by an audit hook."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class OpenedFile(NamedTuple):
    path: Path
    flags: int


_recorders: list[list[OpenedFile]] = []


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and _recorders:
        path, _, flags = args
        if isinstance(path, str | bytes | os.PathLike) and isinstance(flags, int):
            for recorder in _recorders:
                recorder.append(OpenedFile(Path(os.fsdecode(path)), flags))


sys.addaudithook(_hook)  # an audit hook cannot be removed; without a recorder this one ignores every event


@contextmanager
def record_opened_files() -> Iterator[list[OpenedFile]]:
    recorder: list[OpenedFile] = []
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)
