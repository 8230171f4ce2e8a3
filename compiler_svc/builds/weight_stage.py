"""The stage that writes weights, some ranks at a time: into the store, or into one that only the golden check reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import msgspec

from bundle.manifest import MODEL_WEIGHTS, Manifest, WeightShard
from bundle.store.blob_writer import BlobWriter, StoredBlob
from bundle.store.layout import Layout
from bundle.store.oci import WEIGHTS_TYPE
from bundle.store.writer import BundleWriter
from compiler_svc.builds.finished_shards import FinishedShards
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.planning.build_plan import BuildPlan
from compiler_svc.records import Stage
from compiler_svc.sharding.writer import write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from execution.threads import count_processors

#: The name that NxD Inference gives the file.
WEIGHTS_TITLE: Final = "weights/tp{rank}_sharded_checkpoint.safetensors"

#: Passes over the checkpoint at most. Each reads what ranks share anew, from the disk if the checkpoint is larger than
#: the page cache; and what a killed build had written of its last pass is lost.
MAX_PASSES: Final = 2


class WeightStage:
    """Writes the rank shards of one checkpoint."""

    def __init__(
        self, plan: BuildPlan, checkpoint: Checkpoint, report: ProgressReport, finished: FinishedShards
    ) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._report = report
        self._finished = finished
        self._num_threads = min(count_processors(), plan.model.tp_degree)

    def publish(self, layout: Layout, writer: BundleWriter) -> tuple[WeightShard, ...]:
        """Streams the shards into the store, hashes them on the way, and adds them to a bundle."""
        blobs = self._write(layout, "writing the rank weight shards")
        for rank, blob in enumerate(blobs):
            writer.add_blob(blob, WEIGHTS_TYPE, WEIGHTS_TITLE.format(rank=rank))
        return self._describe(blobs)

    def write_aside(self, layout: Layout) -> tuple[WeightShard, ...]:
        """Streams the shards into a store that no bundle refers to."""
        return self._describe(self._write(layout, "writing weights for the check alone"))

    def describe(self) -> tuple[WeightShard, ...]:
        """Describes the shards for a bundle without weights."""
        return tuple(self._plan.weights.describe_shard(rank, None, 0) for rank in self._ranks)

    @property
    def _ranks(self) -> range:
        return range(self._plan.model.tp_degree)

    def _describe(self, blobs: Sequence[StoredBlob]) -> tuple[WeightShard, ...]:
        return tuple(
            self._plan.weights.describe_shard(rank, blob.digest, blob.size_bytes) for rank, blob in enumerate(blobs)
        )

    def _write(self, layout: Layout, message: str) -> list[StoredBlob]:
        """Writes the shards that no earlier attempt has written; returns those of all ranks, in order."""
        self._report.enter(Stage.SHARD, message)
        self._report.update(total_bytes=self._plan.weights.shard_size_bytes * len(self._ranks))
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="finish") as threads:
            found = list(threads.map(lambda rank: self._finished.find(rank, layout), self._ranks))
            blobs = {rank: blob for rank, blob in enumerate(found) if blob is not None}
            if blobs:
                self._report.enter(Stage.SHARD, f"{message}, but for {len(blobs)} written before the restart")
                self._report.add_sharded_bytes(sum(blob.size_bytes for blob in blobs.values()))
            missing = [rank for rank in self._ranks if rank not in blobs]
            finishing: dict[int, Future[StoredBlob]] = {}
            for ranks in divide_into_passes(missing, self._num_threads):
                # The disk is still busy with the last pass while the next one computes.
                for rank, blob in self._write_ranks(layout, ranks).items():
                    finishing[rank] = threads.submit(self._finish, rank, blob)
            blobs |= {rank: future.result() for rank, future in finishing.items()}
        return [blobs[rank] for rank in self._ranks]

    def _write_ranks(self, layout: Layout, ranks: Sequence[int]) -> dict[int, BlobWriter]:
        with ExitStack() as unfinished:
            blobs = {rank: unfinished.enter_context(layout.new_blob()) for rank in ranks}
            write_shards(
                self._plan.weights,
                self._checkpoint,
                blobs,
                num_threads=self._num_threads,
                progress=self._report.add_sharded_bytes,
            )
            unfinished.pop_all()
        return blobs

    def _finish(self, rank: int, blob: BlobWriter) -> StoredBlob:
        with blob:
            stored = blob.commit()
        self._finished.keep(rank, stored)
        return stored


def divide_into_passes(ranks: Sequence[int], num_threads: int) -> Iterator[Sequence[int]]:
    """Divides ranks into at most `MAX_PASSES` groups, each of at least as many ranks as threads if there are enough."""
    size = max(num_threads, -(-len(ranks) // MAX_PASSES))
    for start in range(0, len(ranks), size):
        yield ranks[start : start + size]


def with_shards(manifest: Manifest, shards: tuple[WeightShard, ...]) -> Manifest:
    """The manifest with these shards of the model's weights."""
    sets = (
        msgspec.structs.replace(one, shards=shards) if one.name == MODEL_WEIGHTS else one
        for one in manifest.weight_sets
    )
    return msgspec.structs.replace(manifest, weight_sets=tuple(sets))
