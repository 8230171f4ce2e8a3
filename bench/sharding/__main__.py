"""`python -m bench.sharding`: measures the writing of shards beside a plain loop; see the package."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.other_load import OtherLoad
from bench.sharding.checkpoint import write_checkpoint
from bench.sharding.report import Run, render
from bundle.layout import Layout
from compiler_svc.builds.finished_shards import FOLDER
from compiler_svc.weights.checkpoint import Checkpoint

RESULTS: Final = Path(__file__).with_name("RESULTS.md")
NUM_RANKS: Final = 8
#: What the run needs of the disk, by the checkpoint's size: that, and the files of one way at a time.
_ROOM: Final = 2.2
_POLL_INTERVAL_S: Final = 0.02


@dataclass
class Peaks:
    """The largest values seen of a process's memory, in bytes."""

    anonymous: int = 0
    mapped: int = 0

    def look(self, pid: int) -> None:
        """Looks at a process, which may have ended."""
        with suppress(FileNotFoundError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            self.anonymous = max(self.anonymous, 1024 * int(status.partition("RssAnon:")[2].split()[0]))
            self.mapped = max(self.mapped, 1024 * int(status.partition("RssFile:")[2].split()[0]))


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.sharding", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=16.0, help="size of the checkpoint")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the page to write")
    options = parser.parse_args()
    if shutil.disk_usage(options.directory).free < _ROOM * options.gigabytes * 1e9:
        parser.error(f"{options.directory} has no room for {_ROOM * options.gigabytes:.0f} GB")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        text = measure(Path(directory), options.gigabytes * 1e9)
    options.output.write_text(text)
    print(text)


def measure(work: Path, size_bytes: float) -> str:
    """Runs everything in an empty directory; returns the page."""
    model = work / "model"
    model.mkdir()
    _say("making the checkpoint")
    size_bytes = write_checkpoint(model, size_bytes)
    headers = Checkpoint.open(model).tensors.values()
    largest_bytes = max(2 * math.prod(header.shape) for header in headers)

    _say("the plain loop")
    plain = run("plain", model, work / "plain")
    shutil.rmtree(work / "plain")
    _say("the shards")
    whole = run("shards", model, work / "whole")
    expected = set(Layout(work / "whole" / "store").list_blobs())
    shutil.rmtree(work / "whole")
    _say("the shards, killed")
    killed = run("shards", model, work / "again", until=lambda: len(_records(work / "again")) >= NUM_RANKS // 2)
    before = _records(work / "again")
    _say(f"the shards, behind {len(before)} ranks")
    resumed = run("shards", model, work / "again")
    after = _records(work / "again")
    assert set(Layout(work / "again" / "store").list_blobs()) == expected, "the same shards after a kill"
    assert after.items() >= before.items(), "records of finished ranks stay as they are"
    return render(
        size_bytes=size_bytes,
        largest_bytes=largest_bytes,
        num_ranks=NUM_RANKS,
        num_finished=len(before),
        runs={"plain loop": plain, "shards": whole, "shards, killed": killed, "shards, resumed": resumed},
    )


def run(way: str, model: Path, directory: Path, until: Callable[[], bool] | None = None) -> Run:
    """Measures one way in a process of its own, whose files the page cache does not hold.

    Args:
        until: Kills the process when it answers true.
    """
    _evict(model)
    if way == "shards":
        directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.sharding.worker", way, str(model), str(directory), str(NUM_RANKS)]
    peaks, began_s = Peaks(), time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        load = OtherLoad()
        process.stdin.write("begin\n")
        process.stdin.flush()
        began_s = time.perf_counter()
        while process.poll() is None and not (until is not None and until()):
            peaks.look(process.pid)
            time.sleep(_POLL_INTERVAL_S)
        shares = load.measure()
        process.kill()
        answer = process.stdout.read()
    figures = json.loads(answer) if answer else {"wall_s": time.perf_counter() - began_s}
    assert until is not None or answer, "the worker failed"
    return Run(**figures, anonymous_bytes=peaks.anonymous, mapped_bytes=peaks.mapped, shares=shares)


def _records(directory: Path) -> dict[str, tuple[int, int]]:
    """The records of finished shards: by name, which file it is and when it was written."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.glob(f"{FOLDER}/*.json")}


def _evict(model: Path) -> None:
    """Takes the checkpoint's files out of the page cache."""
    os.sync()
    for path in model.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


if __name__ == "__main__":
    main()
