"""One process that is measured: `python -m bench.sharding.worker WAY MODEL DIRECTORY RANKS`; prints figures as JSON.

It begins to measure when it has read a line, so that its imports do not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch  # noqa: F401 - both ways begin with the same modules loaded, so that their memory compares

from bundle.layout import Layout
from bundle.writer import BundleWriter
from compiler_svc.builds.finished_shards import FOLDER, FinishedShards, digest_inputs
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.builds.weight_stage import WeightStage
from compiler_svc.config import resolve_config
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.weights.checkpoint import Checkpoint
from execution.threads import count_processors

_CHUNK_SIZE_BYTES: Final = 16 << 20


def copy_files(checkpoint: Path, directory: Path, _num_ranks: int) -> None:
    """Reads the checkpoint's files in turn, hashes and writes them, some at a time."""
    directory.mkdir()

    def copy(path: Path) -> str:
        sha256, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_SIZE_BYTES))
        with path.open("rb", buffering=0) as source, (directory / path.name).open("wb", buffering=0) as target:
            while count := source.readinto(buffer):
                sha256.update(buffer[:count])
                target.write(buffer[:count])
            os.fsync(target.fileno())
        return sha256.hexdigest()

    with ThreadPoolExecutor(count_processors()) as threads:
        list(threads.map(copy, sorted(checkpoint.glob("*.safetensors"))))


def write_shards(path: Path, directory: Path, num_ranks: int) -> None:
    """Writes the shards of all ranks into a store, as a build does; goes on with what is there."""
    layout = Layout.create(directory / "store")
    records = directory / FOLDER
    records.mkdir(exist_ok=True)
    checkpoint = Checkpoint.open(path)
    config = {"neuron_config": {"seq_len": 128, "max_context_length": 64, "tp_degree": num_ranks}}
    plan = plan_build(
        checkpoint, resolve_config(config, checkpoint_dtype="bfloat16").config.neuron_config, target="cpu"
    )
    finished = FinishedShards(records, digest_inputs(plan.weights, checkpoint, "sha256:checkpoint"))
    stage = WeightStage(plan, checkpoint, ProgressReport(lambda _news: None), finished)
    stage.publish(layout, BundleWriter(layout))


#: The ways from a checkpoint to files of the same size.
WAYS: Final[dict[str, Callable[[Path, Path, int], None]]] = {"plain": copy_files, "shards": write_shards}


def main(way: str, checkpoint: str, directory: str, num_ranks: str) -> None:
    """Measures one way."""
    sys.stdin.readline()
    before = _read_figures()
    began_s = time.perf_counter()
    WAYS[way](Path(checkpoint), Path(directory), int(num_ranks))
    wall_s = time.perf_counter() - began_s
    after = _read_figures()
    figures = {name: after[name] - before[name] for name in after}
    print(json.dumps(figures | {"wall_s": wall_s, "peak_bytes": after["peak_bytes"]}))


def _read_figures() -> dict[str, float]:
    """Of this process so far: processor seconds, the largest resident memory, bytes from and to disks."""
    status = Path("/proc/self/status").read_text()
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {
        "cpu_s": time.process_time(),
        # Resident: anonymous memory and the touched pages of mapped files, libraries included.
        "peak_bytes": 1024 * int(status.partition("VmHWM:")[2].split()[0]),
        "read_bytes": int(io["read_bytes"]),
        "written_bytes": int(io["write_bytes"]),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
