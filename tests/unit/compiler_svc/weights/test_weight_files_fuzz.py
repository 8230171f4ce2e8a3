"""With any bytes, the tensors of a checkpoint's files are listed or the file is refused with a named error."""

import json
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.headers import read_safetensors_header
from tests.fuzzing import broken, fuzz, mutated
from tests.opened_files import record_opened_files

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DATA = bytes(32)


def file_of(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + DATA


WHOLE = file_of(json.dumps(HEADER).encode())
LENGTHS = st.sampled_from([0, 1, 7, 100, 2**31, 2**63, 2**64 - 1])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed") / "model.safetensors"


def test_the_whole_file_is_read(file: Path) -> None:
    file.write_bytes(WHOLE)
    assert read_safetensors_header(file, file.parent) == {"a": ("float32", (2, 3)), "b": ("bfloat16", (4,))}


@fuzz()
@given(data=mutated(HEADER).map(file_of) | broken(WHOLE) | st.builds(file_of, mutated(HEADER), LENGTHS))
def test_headers(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with record_opened_files() as opened:
        try:
            tensors = read_safetensors_header(file, file.parent)
        except CheckpointInvalid as error:
            tensors = {}
            assert file.name in str(error)  # noqa: PT017 - most examples end here, and some do not
    assert all(isinstance(size, int) and size >= 0 for _, shape in tensors.values() for size in shape)
    assert all(one.path == file and not one.flags & (os.O_WRONLY | os.O_RDWR) for one in opened)


def open_with(directory: Path, name: str, data: bytes) -> None:
    (directory / "config.json").write_text("{}")
    (directory / name).write_bytes(data)
    with suppress(CheckpointInvalid):
        for header in Checkpoint.open(directory).tensors.values():
            assert all(isinstance(size, int) and size >= 0 for size in header.shape)


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("pickle") / "weights"
    torch.save({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    return path.read_bytes()


@fuzz(750)
@given(data=st.data())
def test_pickles(tmp_path: Path, pickled: bytes, data: st.DataObject) -> None:
    open_with(tmp_path, "pytorch_model.bin", data.draw(broken(pickled) | st.binary(max_size=200)))


@fuzz(750)
@given(index=mutated({"metadata": {"total_size": 32}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
def test_indices(tmp_path: Path, index: bytes) -> None:
    open_with(tmp_path, "model.safetensors.index.json", index)
