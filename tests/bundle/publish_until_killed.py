"""Publishes the sample bundle again and again, each time in a child that kills itself one call later than the last.

    python -m tests.bundle.publish_until_killed DIRECTORY

Child N is killed before its call N, and works on a copy of the layout DIRECTORY/before in DIRECTORY/N. The last child
comes to its end; its number is printed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

from bundle.layout import Layout
from bundle.writer import BundleWriter
from tests.bundle.samples import FILES, put_chunks, sample_manifest

#: Whose calls into C are counted: all of the writing code's, and those that pathlib makes for it to change the disk.
WRITING_MODULES = {"bundle.blob_writer", "bundle.layout"}
PATHLIB_CALLS = {"open", "write", "__exit__", "rename", "replace", "unlink"}


def publish(layout: Layout, scratch: Path) -> None:
    """Adds files in every way there is: bytes, a copied file, a moved file, a blob written in chunks."""
    writer = BundleWriter(layout)
    ways = (
        lambda path: path.read_bytes(),
        lambda path: path,
        lambda path: put_chunks(layout, path.read_bytes(), 4096),
        lambda path: layout.ingest_file(path, move=True),
        lambda path: path.read_bytes(),
    )
    for number, ((title, media_type, _), way) in enumerate(zip(FILES, ways, strict=True)):
        writer.add_blob(way(scratch / str(number)), media_type, title)
    writer.publish(sample_manifest(version="2"))


def is_counted(module: str, function: str) -> bool:
    return module in WRITING_MODULES or (module == "pathlib" and function in PATHLIB_CALLS)


def kill_after(calls: int) -> None:
    """Makes this process kill itself before the given call, counting calls as said above."""
    remaining = calls

    def count(frame: FrameType, event: str, function: object) -> None:
        nonlocal remaining
        if event == "c_call" and is_counted(frame.f_globals["__name__"], getattr(function, "__name__", "")):
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def main(directory: Path) -> None:
    # The kernel keeps what a killed process wrote; waiting for the disk hundreds of times proves nothing.
    os.fsync = abs  # in C, so that its calls count
    calls = 0
    while True:
        root, scratch = directory / str(calls), directory / f"{calls}-scratch"
        shutil.copytree(directory / "before", root)
        scratch.mkdir()
        for number, (_, _, data) in enumerate(FILES):
            (scratch / str(number)).write_bytes(data)
        child = os.fork()
        if child == 0:
            layout = Layout(root)
            kill_after(calls)
            publish(layout, scratch)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code != -signal.SIGKILL:
            sys.stdout.write(f"{calls}\n")
            sys.exit(exit_code)
        calls += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
