"""The directory of captures: names, whole files, and failures that it survives."""

from __future__ import annotations

import asyncio
import fcntl
import json
import resource
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from bundle.errors import ResourcesShort
from bundle.manifest import TensorSpec
from runtime_svc.captures.capture_file import render_capture
from runtime_svc.captures.directory import (
    MAX_CAPTURES,
    SUFFIX,
    CaptureDirectory,
    CaptureOutcome,
    PendingCapture,
    file_name,
)
from runtime_svc.engine.capture import MAX_CAPTURE_BYTES, CapturedInput, CapturedStep, InputCapture
from runtime_svc.errors import CaptureUnwritable, TooManyCaptures
from tests.shortages import limited

SPEC = TensorSpec(name="input_ids", dtype="int32", shape=(1, 2))


def captured(index: int, data: bytes = struct.pack("<2i", 7, 9)) -> CapturedStep:
    return CapturedStep(index, "token_generation_16", 0, 1, 3, (CapturedInput(SPEC, data),))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def begin(
    directory: CaptureDirectory, request_id: str, *steps: CapturedStep, deployment_id: str = "d"
) -> PendingCapture:
    inputs = InputCapture(0, 8)
    pending = await directory.begin(inputs, deployment_id=deployment_id, bundle="sha256:0", request_id=request_id)
    for step in steps:
        inputs.keep(step)
    return pending


async def write(
    directory: CaptureDirectory, request_id: str, *, deployment_id: str = "d", steps: int = 1
) -> CaptureOutcome:
    captures = map(captured, range(steps))
    return await (await begin(directory, request_id, *captures, deployment_id=deployment_id)).write()


@given(st.text(max_size=128), st.text(max_size=128))
def test_names_stay_inside_their_directory_and_apart(one: str, other: str) -> None:
    names = [file_name(one), file_name(other)]
    for name in names:
        assert "/" not in name
        assert "\0" not in name
        assert not name.startswith(".")
        assert len((name + SUFFIX).encode()) <= 255
    assert (names[0] == names[1]) == (one == other)


def test_plain_ids_are_their_own_names() -> None:
    assert file_name("req-7_a.b") == "req-7_a.b"
    assert file_name("..") == "%2E."
    assert file_name("../../etc/passwd") == "%2E.%2F..%2Fetc%2Fpasswd"


async def test_the_next_runtime_removes_what_a_killed_one_was_writing(tmp_path: Path) -> None:
    await write(CaptureDirectory(tmp_path), "whole")
    dead, living = tmp_path / "d" / ".dead.partial", tmp_path / "d" / ".living.partial"
    dead.touch()
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        CaptureDirectory(tmp_path)
    assert names_in(tmp_path / "d") == [living.name, "whole.safetensors"]


async def test_hostile_ids_write_inside_the_directory(tmp_path: Path) -> None:
    root = tmp_path / "captures"
    directory = CaptureDirectory(root)
    ids = ["../../escaped", "/etc/passwd", "..", ".", "a\0b", "é" * 128, "x" * 128, "C:\\x\n"]
    for deployment_id in ("..", "d"):
        for request_id in ids:
            outcome = await write(directory, request_id, deployment_id=deployment_id)
            assert outcome.path is not None
            assert outcome.path.resolve().is_relative_to(root.resolve())
    await directory.close()
    assert names_in(tmp_path) == ["captures"]
    assert names_in(root) == ["%2E.", "d"]
    assert len(names_in(root / "d")) == len(names_in(root / "%2E.")) == len(ids)


async def test_files_are_for_their_owner_and_replaced_whole(tmp_path: Path) -> None:
    directory = CaptureDirectory(tmp_path / "captures")
    for steps in (3, 1):
        outcome = await write(directory, "same", steps=steps)
        assert outcome.path is not None
        with safe_open(outcome.path, "np") as file:
            assert sorted(file.keys()) == [f"{index}.input_ids" for index in range(steps)]
            assert file.metadata()["captured_steps"] == str(steps)
            assert file.get_tensor("0.input_ids").tolist() == [[7, 9]]
    for path in (outcome.path, *outcome.path.parents[:2]):
        assert path.stat().st_mode & 0o077 == 0, path
    assert names_in(outcome.path.parent) == ["same.safetensors"]
    await directory.close()


async def test_a_directory_that_takes_no_file_is_told_before_anything_runs(tmp_path: Path) -> None:
    occupied = tmp_path / "captures"
    occupied.write_text("a file")
    directory = CaptureDirectory(occupied)
    for _ in range(MAX_CAPTURES + 1):
        with pytest.raises(CaptureUnwritable, match="capture directory"):
            await write(directory, "r")
    occupied.unlink()
    assert (await write(directory, "r")).error is None
    await directory.close()


async def test_a_write_that_fails_is_an_outcome_and_leaves_no_file(tmp_path: Path) -> None:
    directory = CaptureDirectory(tmp_path)
    pending = await begin(directory, "r")
    # What takes the file's place cannot be replaced by one.
    (tmp_path / "d" / "r.safetensors" / "inside").mkdir(parents=True)
    outcome = await pending.write()
    assert outcome.path is None
    assert isinstance(outcome.error, CaptureUnwritable)
    assert "r.safetensors" in str(outcome.error)
    assert names_in(tmp_path / "d") == ["r.safetensors"], "a partial file was left"
    await directory.close()


async def test_so_many_requests_capture_at_once(tmp_path: Path) -> None:
    directory = CaptureDirectory(tmp_path)
    pending = [await begin(directory, str(index)) for index in range(MAX_CAPTURES)]
    with pytest.raises(TooManyCaptures) as refused:
        await write(directory, "one more")
    assert refused.value.retry_after_s == 1.0
    pending[0].cancel()
    await asyncio.gather(*(one.write() for one in pending[1:]))
    assert (await write(directory, "one more")).error is None
    await directory.close()


async def test_a_file_is_written_although_nobody_waits(tmp_path: Path) -> None:
    directory = CaptureDirectory(tmp_path)
    pending = await begin(directory, "r")
    assert pending.write() is pending.write()
    await directory.close()
    assert pending.path.exists()


def test_captures_are_bounded() -> None:
    capture = InputCapture(0, 1024)
    large = bytes(MAX_CAPTURE_BYTES // 2)
    for index in range(4):
        capture.keep(captured(index, large))
    capture.keep(captured(4, b""))
    assert [step.index for step in capture.steps] == [0, 1], "later steps would leave a gap"
    assert capture.num_dropped == 3


def test_chosen_steps_are_counted_from_the_requests_first() -> None:
    capture = InputCapture(2, 3)
    assert [capture.begin_step() for _ in range(7)] == [None, None, 2, 3, 4, None, None]


def test_equal_captures_are_equal_files_and_say_what_they_are() -> None:
    capture = InputCapture(1, 2)
    capture.keep(captured(1))
    files = {b"".join(render_capture(capture, deployment_id="d", bundle="b", request_id="r")) for _ in range(2)}
    (file,) = files
    (size,) = struct.unpack("<Q", file[:8])
    assert size % 8 == 0
    assert json.loads(file[8 : 8 + size])["__metadata__"] == {
        "format": "kiln.inputs.v1",
        "deployment_id": "d",
        "bundle": "b",
        "request_id": "r",
        "first_step": "1",
        "num_steps": "2",
        "captured_steps": "1",
        "dropped_steps": "0",
        "1.executable": "token_generation_16",
        "1.row": "0",
        "1.num_tokens": "1",
        "1.weight_epoch": "3",
    }


async def test_a_disk_without_room_is_named_and_passes(tmp_path: Path) -> None:
    directory = CaptureDirectory(tmp_path)
    await write(directory, "a")
    with limited(resource.RLIMIT_FSIZE, 0), pytest.raises(ResourcesShort, match="disk space"):
        await write(directory, "b")
    pending = await begin(directory, "b", captured(0, bytes(2 << 20)))
    # Room for the log of the test.
    with limited(resource.RLIMIT_FSIZE, 1 << 20):
        outcome = await pending.write()
    assert isinstance(outcome.error, ResourcesShort)
    assert (await write(directory, "b")).path is not None
    assert names_in(tmp_path / "d") == ["a.safetensors", "b.safetensors"]
    await directory.close()
