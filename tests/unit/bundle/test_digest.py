import hashlib
import math
from pathlib import Path

import pytest

from bundle.digest import (
    CHUNK_SIZE_BYTES,
    canonical_json,
    digest_hex,
    parse_digest,
    sha256_bytes,
    sha256_file,
)
from bundle.errors import DigestInvalid

# FIPS 180-2, appendix B.1.
ABC = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_known_vector() -> None:
    assert sha256_bytes(b"abc") == ABC
    assert parse_digest(ABC) == ABC
    assert digest_hex(ABC) == ABC[7:]


@pytest.mark.parametrize(
    "text",
    ["", "sha256:", ABC[7:], ABC.upper(), ABC + "0", ABC[:-1], ABC + "\n", "sha512:" + ABC[7:], " " + ABC],
)
def test_what_is_no_digest_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(DigestInvalid) as caught:
        parse_digest(text)
    assert caught.value.violations[0].value == repr(text)
    assert "64 lower-case hexadecimal" in str(caught.value)


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_SIZE_BYTES, CHUNK_SIZE_BYTES + 1])
def test_file_is_hashed_in_chunks_that_are_reported(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x5a" * size_bytes)
    reported: list[int] = []
    assert sha256_file(path, reported.append) == "sha256:" + hashlib.sha256(b"\x5a" * size_bytes).hexdigest()
    assert sum(reported) == size_bytes
    assert all(0 < count <= CHUNK_SIZE_BYTES for count in reported)


def test_chunks_are_large_enough_for_other_threads_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hashlib releases the interpreter's lock for updates of more than 2047 bytes."""
    sizes: list[int] = []

    class Recorder:
        def update(self, data: memoryview) -> None:
            sizes.append(len(data))

        def hexdigest(self) -> str:
            return ABC[7:]

    path = tmp_path / "file"
    path.write_bytes(bytes(3 * CHUNK_SIZE_BYTES + 5))
    monkeypatch.setattr(hashlib, "sha256", Recorder)
    assert sha256_file(path) == ABC
    assert sum(sizes) == path.stat().st_size
    assert min(sizes[:-1]) > 2047


def test_canonical_json_is_independent_of_order() -> None:
    assert canonical_json({"b": [1, 2.0], "a": "€"}) == canonical_json({"a": "€", "b": [1, 2]})
    assert canonical_json({"b": 1, "a": 0.5}) == b'{"a":0.5,"b":1}'


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**53, b"bytes", {1: 2}])
def test_what_json_has_not_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        canonical_json(value)
