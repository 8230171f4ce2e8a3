"""The shards that a build has written so far, one record each, or the files of a checkpoint. They outlive the build
process.

A shard is a blob of the store, or of a store of the build's own. A record names the blob and digests everything that
its bytes depend on. So the next attempt at the build takes a blob over only if it would write the same bytes, and only
after it has read the blob.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from bundle.digest import Digest, canonical_json, sha256_bytes, sha256_file
from bundle.store.blob_writer import StoredBlob
from bundle.store.layout import Layout
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.weights.checkpoint import Checkpoint

#: Below the directory of a build.
FOLDER: Final = "sharded"
_RECORD: Final = "rank{rank}.json"


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    #: Digest of everything that its bytes depend on.
    inputs: str
    blob: Digest
    size_bytes: int


class FinishedShards:
    """A directory of records, one for each rank."""

    def __init__(self, directory: Path, inputs: str) -> None:
        self._directory = directory
        self._inputs = inputs

    def keep(self, rank: int, blob: StoredBlob) -> None:
        """Records a rank's shard, which its store holds durably."""
        _write_record(self._path(rank), _Record(inputs=self._inputs, blob=blob.digest, size_bytes=blob.size_bytes))

    def find(self, rank: int, layout: Layout) -> StoredBlob | None:
        """Finds the shard that an earlier attempt wrote, and pins it; None if there is none, if it was made from
        something else, or if its bytes differ from the record.
        """
        record = _read_record(self._path(rank))
        if record is None or record.inputs != self._inputs or not layout.pin(record.blob):
            return None
        if sha256_file(layout.blob_path(record.blob)) != record.blob:
            # Unless it is deleted, the store keeps it when the shard is written again.
            layout.delete_blob(record.blob)
            return None
        return StoredBlob(record.blob, record.size_bytes)

    def _path(self, rank: int) -> Path:
        return self._directory / _RECORD.format(rank=rank)


class FinishedFiles:
    """A directory of records, one for each file of weights of a checkpoint that is being written."""

    def __init__(self, directory: Path, inputs: str) -> None:
        self._directory = directory
        self._inputs = inputs

    def keep(self, file: Path) -> None:
        """Records a file, which its disk holds durably."""
        record = _Record(inputs=self._inputs, blob=sha256_file(file), size_bytes=file.stat().st_size)
        _write_record(self._path(file.name), record)

    def has(self, file: Path) -> bool:
        """Whether an earlier attempt has written a file from the same, and its bytes are still what the record says."""
        record = _read_record(self._path(file.name))
        return (
            record is not None and record.inputs == self._inputs and file.is_file() and sha256_file(file) == record.blob
        )

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"


def digest_inputs(plan: WeightPlan, checkpoint: Checkpoint, checkpoint_digest: str) -> str:
    """Digests what shards are made from: weights, what becomes of them, and the code that does it.

    `checkpoint_digest` is of the weights' bytes, some time before. If a file has been written since, the result is
    another digest, even if the file was given its former bytes again.
    """
    files = {file.name: file.stat() for file in checkpoint.files}
    return sha256_bytes(
        canonical_json(
            {
                "checkpoint": checkpoint_digest,
                # As text, because times in nanoseconds are larger than the integers of canonical JSON.
                "files": {
                    name: f"{one.st_dev} {one.st_ino} {one.st_size} {one.st_ctime_ns}" for name, one in files.items()
                },
                "tensors": sha256_bytes(repr(plan).encode()),
                "code": digest_bundle_code(),
            }
        )
    )


def list_finished_shards(jobs: Path) -> frozenset[str]:
    """Digests of the shards that unfinished builds have recorded."""
    records = (_read_record(path) for path in jobs.glob(f"*/{FOLDER}/{_RECORD.format(rank='*')}"))
    return frozenset(record.blob for record in records if record is not None)


def _write_record(path: Path, record: _Record) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.encode(record))
    unfinished.replace(path)


def _read_record(path: Path) -> _Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError):
        # None yet, or half a record after a power cut.
        return None
