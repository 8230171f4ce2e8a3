"""The stage that writes weights, shard by shard: into the store, or into files for the golden check alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from bundle.digest import sha256_file
from bundle.layout import Layout
from bundle.manifest import Manifest, WeightShard
from bundle.oci import WEIGHTS_TYPE
from bundle.writer import BundleWriter
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.planning.build_plan import BuildPlan
from compiler_svc.records import Stage
from compiler_svc.sharding.writer import write_shard
from compiler_svc.weights.checkpoint import Checkpoint

#: The name that NxD Inference gives the file.
WEIGHTS_TITLE: Final = "weights/tp{rank}_sharded_checkpoint.safetensors"


class WeightStage:
    """Writes the rank shards of one checkpoint."""

    def __init__(self, plan: BuildPlan, checkpoint: Checkpoint, report: ProgressReport) -> None:
        """Takes the plan and the checkpoint to write, and the receiver of progress."""
        self._plan = plan
        self._checkpoint = checkpoint
        self._report = report

    def publish(self, layout: Layout, writer: BundleWriter) -> tuple[WeightShard, ...]:
        """Streams the shards into the store, hashes them on the way, and adds them to a bundle."""
        return tuple(self._publish(layout, writer, rank) for rank in self._enter("writing the rank weight shards"))

    def write_aside(self, directory: Path) -> tuple[tuple[WeightShard, ...], dict[str, Path]]:
        """Writes the shards into a directory; returns them, and their files by digest."""
        paths: dict[str, Path] = {}
        shards = tuple(
            self._write_aside(directory, paths, rank) for rank in self._enter("writing weights for the check alone")
        )
        return shards, paths

    def describe(self) -> tuple[WeightShard, ...]:
        """Describes the shards for a bundle without weights."""
        return tuple(self._plan.weights.describe_shard(rank, None, 0) for rank in self._ranks)

    @property
    def _ranks(self) -> range:
        return range(self._plan.model.tp_degree)

    def _enter(self, message: str) -> range:
        self._report.enter(Stage.SHARD, message)
        self._report.update(total_bytes=self._plan.weights.shard_size_bytes * self._plan.model.tp_degree)
        return self._ranks

    def _publish(self, layout: Layout, writer: BundleWriter, rank: int) -> WeightShard:
        with layout.new_blob() as blob:
            write_shard(self._plan.weights, self._checkpoint, rank, blob, progress=self._report.add_sharded_bytes)
            stored = blob.commit()
        writer.add_blob(stored, WEIGHTS_TYPE, WEIGHTS_TITLE.format(rank=rank))
        return self._plan.weights.describe_shard(rank, stored.digest, stored.size_bytes)

    def _write_aside(self, directory: Path, paths: dict[str, Path], rank: int) -> WeightShard:
        path = directory / f"rank{rank}.safetensors"
        with path.open("wb") as file:
            size_bytes = write_shard(
                self._plan.weights, self._checkpoint, rank, file, progress=self._report.add_sharded_bytes
            )
        digest = sha256_file(path)
        paths[digest] = path
        return self._plan.weights.describe_shard(rank, digest, size_bytes)


def with_shards(manifest: Manifest, shards: tuple[WeightShard, ...]) -> Manifest:
    """The manifest with these shards in its weight set."""
    (weight_set,) = manifest.weight_sets
    return msgspec.structs.replace(manifest, weight_sets=(msgspec.structs.replace(weight_set, shards=shards),))
