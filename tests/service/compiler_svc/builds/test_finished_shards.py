"""Shards that outlive the build that wrote them: after a kill at any point, with other inputs, with broken files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from bundle.digest import sha256_file
from bundle.store.blob_writer import StoredBlob
from bundle.store.layout import Layout
from bundle.store.removal import Needs, collect_garbage
from compiler_svc.builds import weight_stage
from compiler_svc.builds.finished_shards import FOLDER, FinishedShards, list_finished_shards
from tests.checkpoints.random_weights import write_checkpoint
from tests.kill_points import repeat
from tests.service.compiler_svc.builds.shard_until_killed import PROCESSORS, RANKS, write

STEP = 67


@dataclass(frozen=True)
class Written:
    """What an attempt did: the ranks that it wrote, and the blobs of all ranks."""

    ranks: list[int]
    blobs: list[str | None]


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stage, "count_processors", lambda: PROCESSORS)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def prepare(path: Path) -> Path:
    write_checkpoint(path / "model")
    home = path / "before"
    Layout.create(home / "store")
    (home / "jobs" / "build" / FOLDER).mkdir(parents=True)
    return home


def attempt(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch, **inputs: str) -> Written:
    ranks: list[int] = []
    write_shards = weight_stage.write_shards

    def note(plan: object, checkpoint: object, sinks: dict[int, object], **options: object) -> int:
        ranks.extend(sinks)
        return write_shards(plan, checkpoint, sinks, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(weight_stage, "write_shards", note)
        shards = write(home, model, **inputs)
    for shard in shards:
        assert shard.blob is not None
        assert sha256_file(Layout(home / "store").blob_path(shard.blob)) == shard.blob
    return Written(ranks, [shard.blob for shard in shards])


def collect(home: Path) -> None:
    """What a compiler does at its start."""
    collect_garbage(Layout(home / "store"), lambda: Needs(blobs=list_finished_shards(home / "jobs")))


def recorded(home: Path) -> list[int]:
    return [rank for rank in range(RANKS) if (home / "jobs" / "build" / FOLDER / f"rank{rank}.json").exists()]


def test_wherever_a_build_is_killed_the_next_one_writes_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = tmp_path / "model", attempt(prepare(tmp_path), tmp_path / "model", monkeypatch)
    assert expected.ranks == [*range(RANKS)]
    before = tmp_path / "before"
    for path in (*(before / "store" / "blobs" / "sha256").iterdir(), *(before / "jobs" / "build" / FOLDER).iterdir()):
        path.unlink()
    seen: set[int] = set()
    for home in repeat("tests.service.compiler_svc.builds.shard_until_killed", before, model, step=STEP):
        done = recorded(home)
        seen.add(len(done))
        collect(home)
        assert set(Layout(home / "store").list_blobs()) == list_finished_shards(home / "jobs")
        assert len(list_finished_shards(home / "jobs")) == len(done)
        written = attempt(home, model, monkeypatch)
        assert written.ranks == [rank for rank in range(RANKS) if rank not in done]
        assert written.blobs == expected.blobs
    assert {0, RANKS} < seen, "kills before, between and after the passes"


def test_a_shard_that_was_not_recorded_is_collected_and_written_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, keep = home.parent / "model", FinishedShards.keep

    def die_for_one(self: FinishedShards, rank: int, blob: StoredBlob) -> None:
        if rank == 1:
            raise InterruptedError
        keep(self, rank, blob)

    with monkeypatch.context() as patch:
        patch.setattr(FinishedShards, "keep", die_for_one)
        with pytest.raises(InterruptedError):
            attempt(home, model, monkeypatch)
    blobs = set(Layout(home / "store").list_blobs())
    collect(home)
    (unrecorded,) = blobs - set(Layout(home / "store").list_blobs())
    written = attempt(home, model, monkeypatch)
    assert (written.ranks, written.blobs[1]) == ([1], unrecorded)


def test_shards_of_other_inputs_are_written_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = home.parent / "model"
    first = attempt(home, model, monkeypatch)
    assert attempt(home, model, monkeypatch) == Written([], first.blobs)
    assert attempt(home, model, monkeypatch, checkpoint_digest="sha256:other").ranks == [*range(RANKS)]
    attempt(home, model, monkeypatch)
    # Written anew, with the same bytes: who knows what it held in between?
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert attempt(home, model, monkeypatch) == Written([*range(RANKS)], first.blobs)
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "model.safetensors")
    changed = attempt(home, model, monkeypatch)
    assert changed.ranks == [*range(RANKS)]
    assert not set(changed.blobs) & set(first.blobs)


@pytest.mark.parametrize("damage", ["blob", "no blob", "record", "no record"])
def test_a_damaged_shard_is_written_again(home: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = home.parent / "model"
    first = attempt(home, model, monkeypatch)
    blob, record = (
        Layout(home / "store").blob_path(str(first.blobs[2])),
        home / "jobs" / "build" / FOLDER / "rank2.json",
    )
    match damage:
        case "blob":
            # As large as before, which is all that the store looks at.
            content = bytearray(blob.read_bytes())
            content[-1] ^= 1
            blob.unlink()
            blob.write_bytes(content)
        case "no blob":
            blob.unlink()
        case "record":
            os.truncate(record, record.stat().st_size // 2)
        case _:
            record.unlink()
    assert attempt(home, model, monkeypatch) == Written([2], first.blobs)
