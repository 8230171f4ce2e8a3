"""Opening a weight file with any bytes succeeds or raises CheckpointInvalid."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.integers(-2, 40) | st.sampled_from([2**31, 2**63, 2**64 - 1, 2**64])
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "U8", "F4", "X"]) | JSON,
        "shape": st.lists(NUMBERS, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBERS, max_size=3) | JSON,
    },
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRIES | JSON, max_size=3).map(
    lambda entries: json.dumps(entries).encode()
)

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_with(directory: Path, name: str, data: bytes) -> None:
    (directory / "config.json").write_text("{}")
    (directory / name).write_bytes(data)
    with suppress(CheckpointInvalid):
        for header in Checkpoint.open(directory).tensors.values():
            assert all(isinstance(size, int) and size >= 0 for size in header.shape)


@quick
@given(header=HEADERS, length=st.none() | NUMBERS, tail=st.binary(max_size=64))
def test_safetensors_headers(tmp_path: Path, header: bytes, length: int | None, tail: bytes) -> None:
    size = len(header) if length is None else length % 2**64
    open_with(tmp_path, "model.safetensors", struct.pack("<Q", size) + header + tail)


@quick
@given(data=st.binary(max_size=200))
def test_safetensors_bytes(tmp_path: Path, data: bytes) -> None:
    open_with(tmp_path, "model.safetensors", data)


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("pickle") / "weights"
    torch.save({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    return path.read_bytes()


@quick
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=8))
def test_flipped_bytes_of_pickles(tmp_path: Path, pickled: bytes, flips: list[tuple[int, int]]) -> None:
    data = bytearray(pickled)
    for position, mask in flips:
        data[position % len(data)] ^= mask
    open_with(tmp_path, "pytorch_model.bin", bytes(data))


@quick
@given(data=st.binary(max_size=200))
def test_pickle_bytes(tmp_path: Path, data: bytes) -> None:
    open_with(tmp_path, "pytorch_model.bin", data)


@quick
@given(index=JSON | st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=4), JSON, max_size=3)}))
def test_indices(tmp_path: Path, index: Any) -> None:
    open_with(tmp_path, "model.safetensors.index.json", json.dumps(index).encode())
