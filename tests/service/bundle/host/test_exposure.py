"""Who else may change a file, by owner and mode of the file and its directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bundle.host.exposure import FileStamp, close_to_others, describe_exposure
from bundle.store.layout import Layout


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "store" / "blob"
    path.parent.mkdir(mode=0o755)
    path.write_bytes(b"weights")
    path.chmod(0o444)
    return path


def belong_to(user: int) -> os.stat_result:
    """What stands in for a file of another user: only root can make one."""
    return os.stat_result((0o100444, 0, 0, 1, user, user, 7, 0, 0, 0))


@pytest.mark.parametrize(
    ("expose", "exposure"),
    [
        pytest.param(lambda _: None, None, id="private"),
        pytest.param(lambda blob: blob.chmod(0o464), "its file can be written by its group", id="group-file"),
        pytest.param(lambda blob: blob.chmod(0o446), "its file can be written by everybody", id="others-file"),
        pytest.param(lambda blob: blob.parent.chmod(0o775), "its directory can be written by its group", id="group"),
        pytest.param(lambda blob: blob.parent.chmod(0o757), "its directory can be written by everybody", id="others"),
        pytest.param(lambda blob: blob.parent.chmod(0o1777), None, id="sticky"),
        pytest.param(lambda blob: blob.chmod(0o600), None, id="own"),
    ],
)
def test_modes(blob: Path, expose: Callable[[Path], None], exposure: str | None) -> None:
    expose(blob)
    assert describe_exposure(blob) == exposure


@pytest.mark.parametrize(("is_mounted_read_only", "exposure"), [(False, "its file belongs to user 4711"), (True, None)])
def test_another_owner(
    blob: Path, monkeypatch: pytest.MonkeyPatch, is_mounted_read_only: bool, exposure: str | None
) -> None:
    monkeypatch.setattr(Path, "stat", lambda self, **_: belong_to(4711))
    flags = os.ST_RDONLY if is_mounted_read_only else 0
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((0, 0, 0, 0, 0, 0, 0, 0, flags, 255)))
    assert describe_exposure(blob) == exposure


def test_files_of_root_are_private() -> None:
    assert describe_exposure(Path("/etc/passwd")) is None


def test_a_write_changes_the_stamp_and_a_new_name_does_not(blob: Path) -> None:
    stamp = FileStamp.of(blob)
    blob.with_name("other").hardlink_to(blob)
    blob.chmod(0o600)
    assert not stamp.has_changed(blob)
    with blob.open("r+b") as file:
        file.write(b"W")
    assert stamp.has_changed(blob)
    blob.unlink()
    assert not stamp.has_changed(blob), "pages of a removed file stay as they are"


def test_a_layout_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        layout = Layout.create(tmp_path / "layout")
    finally:
        os.umask(before)
    stored = layout.put_blob(b"weights")
    assert describe_exposure(layout.blob_path(stored.digest)) is None
    (layout.root / "blobs/sha256").chmod(0o777)
    Layout.create(layout.root)
    assert describe_exposure(layout.blob_path(stored.digest)) is None


def test_the_mode_of_another_s_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    close_to_others(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o777
