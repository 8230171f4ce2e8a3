"""Launches rank groups: verifies blobs, starts processes, maps weights, warms up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from bundle.manifest import Manifest
from bundle.store.reader import Bundle
from execution.device_errors import DeviceBroken
from execution.errors import MappedFileChanged, RankLost
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.bundles.private_files import PrivateFiles
from runtime_svc.deployments.adapters import find_changed_adapters, lose_adapter
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.progress import LoadStage
from runtime_svc.engine.engine import EngineState
from runtime_svc.engine.ranks import RankLauncher, Ranks

#: Seconds between two looks at mapped files. A look reads the times of each file: microseconds.
WATCH_INTERVAL_S: Final = 5.0

_log = structlog.get_logger("ranks")
_watch_log = structlog.get_logger("deployments")

StageReport = Callable[[LoadStage, int, int], None]


class StartingRanks(Ranks, Protocol):
    """A rank group whose processes run, without weights and executables so far."""

    async def load(self) -> None:
        """Maps weights if the manifest has any, loads every executable, allocates zeroed state."""


class StartRanks(Protocol):
    """Starts the processes of a rank group; `execution.ranks.group.RankGroup.start` is the real one."""

    async def __call__(
        self,
        manifest: Manifest,
        blob_path: Mapping[str, Path],
        *,
        num_threads: int,
        log_sink: Callable[[int, str], None],
        cores: Sequence[int],
    ) -> StartingRanks:
        """Starts one process for each rank."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """A bundle whose weights are used, and the reference that named it."""

    ref: str
    bundle: Bundle

    def shard_paths_by_rank(self) -> dict[int, Path]:
        """Returns the weight file of each rank."""
        return {
            shard.rank: self.bundle.blob_path(shard.blob)
            for shard in self.bundle.manifest.shards()
            if shard.blob is not None
        }


@dataclass(frozen=True, slots=True)
class GroupLauncher:
    """Launches groups that run the executables of one bundle with the weights of one bundle, usually the same.

    Attributes:
        weights: Bundle whose weights they use; None if the weights are loaded later.
        library: Verifies both bundles before ranks map a file, at restarts too: files may have changed since.
        core_pool: Learns of cores that need a reset.
        report: Called at each stage with done and total bytes; None at restarts, which no client watches.
    """

    deployment_id: str
    executables: Bundle
    weights: WeightsSource | None
    library: BundleLibrary
    start: StartRanks
    num_threads: int
    cores: tuple[int, ...]
    core_pool: CorePool
    report: StageReport | None = None

    @property
    def has_weights(self) -> bool:
        """See `RankLauncher.has_weights`."""
        return self.weights is not None

    async def launch(self) -> Ranks:
        """See `RankLauncher.launch`."""
        self.core_pool.require_working(self.cores)
        await self._verify()
        self._enter(LoadStage.MAP)
        manifest = self.executables.manifest
        if self.weights is not None:
            # Only the executables say which mutable sets they are bound to.
            replaced = (one for one in self.weights.bundle.manifest.weight_sets if not one.is_mutable)
            mutable = (one for one in manifest.weight_sets if one.is_mutable)
            manifest = msgspec.structs.replace(manifest, weight_sets=(*replaced, *mutable))
        ranks = await self.start(
            manifest, self._blob_paths(), num_threads=self.num_threads, log_sink=self._log_line, cores=self.cores
        )
        ranks.died.add_done_callback(self._note_end)
        try:
            await ranks.load()
            await self._require_unchanged()
            if self.has_weights:
                await self.warm_up(ranks)
        except BaseException:
            await ranks.close()
            raise
        return ranks

    def find_changed(self) -> str | None:
        """Returns the title of a file that has been written since it was verified; None if there is none."""
        for bundle in self._bundles:
            assert isinstance(bundle.layout, PrivateFiles), "a bundle of the library"
            digest = bundle.layout.find_changed()
            if digest is not None:
                return next(blob.title for blob in bundle.blobs if blob.digest == digest) or digest
        return None

    async def warm_up(self, ranks: Ranks) -> None:
        """See `RankLauncher.warm_up`; does not warm up if the manifest says `skip_warmup`."""
        if not self.executables.manifest.serving.skip_warmup:
            self._enter(LoadStage.WARMUP)
            await ranks.warm_up()

    def _note_end(self, died: asyncio.Future[RankLost]) -> None:
        """Takes the core of a rank out of service if it needs a reset."""
        error = None if died.cancelled() else died.result()
        if isinstance(error, DeviceBroken):
            core = self.cores[error.rank]
            _log.error("core is broken", deployment_id=self.deployment_id, core=core, error=str(error))
            self.core_pool.note_broken(core)

    async def _require_unchanged(self) -> None:
        title = await asyncio.to_thread(self.find_changed)
        if title is not None:
            raise MappedFileChanged(title)

    async def _verify(self) -> None:
        self._enter(LoadStage.VERIFY)
        await self.library.verify(self.executables, self._report_verified)
        if self.weights is not None and self.weights.bundle.digest != self.executables.digest:
            await self.library.verify(self.weights.bundle)

    def _blob_paths(self) -> dict[str, Path]:
        return {blob.digest: bundle.blob_path(blob.digest) for bundle in self._bundles for blob in bundle.blobs}

    @property
    def _bundles(self) -> list[Bundle]:
        return [self.executables] if self.weights is None else [self.executables, self.weights.bundle]

    def _enter(self, stage: LoadStage) -> None:
        if self.report is not None:
            self.report(stage, 0, 0)

    def _report_verified(self, done_bytes: int, total_bytes: int) -> None:
        if self.report is not None:
            self.report(LoadStage.VERIFY, done_bytes, total_bytes)

    def _log_line(self, rank: int, line: str) -> None:
        _log.info("rank output", deployment_id=self.deployment_id, rank=rank, line=line)


class FileWatch:
    """Ends ranks whose files are written while they map them: they would compute with other numbers.

    They restart, which verifies the files: a deployment whose file is damaged fails with `BLOB_CORRUPT`.
    """

    def __init__(
        self, list_deployments: Callable[[], Iterable[Deployment]], *, interval_s: float = WATCH_INTERVAL_S
    ) -> None:
        self._list_deployments = list_deployments
        self._interval_s = interval_s

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            for deployment in self._list_deployments():
                engine = deployment.engine
                if engine is None or engine.state is not EngineState.READY:
                    continue
                # In a thread, because a file system of the network may take its time.
                title = await asyncio.to_thread(_find_changed, engine.weights.launchers)
                if title is not None:
                    _watch_log.error("a mapped file has changed", deployment_id=deployment.deployment_id, title=title)
                    engine.ranks.end(MappedFileChanged(title))
                    continue
                for digest, blob in await asyncio.to_thread(find_changed_adapters, deployment, engine):
                    lose_adapter(deployment, engine, digest, f"blob {blob} has been written since it was verified")


def _find_changed(launchers: Sequence[RankLauncher]) -> str | None:
    """Returns the title of a file of one of the launchers that has been written since it was verified."""
    groups = [one for one in launchers if isinstance(one, GroupLauncher)]
    return next((title for title in (one.find_changed() for one in groups) if title is not None), None)
