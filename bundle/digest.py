"""Digests, and the canonical JSON for hashing.

A digest is a plain string, `sha256:` and 64 lower-case hexadecimal digits. Code that gets a digest from outside passes
it to `parse_digest` before it makes a path of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import rfc8785

from bundle.errors import DigestInvalid

PREFIX: Final = "sha256:"
PATTERN: Final = r"\Asha256:[0-9a-f]{64}\Z"

#: Type of a digest in a strict record.
Digest = Annotated[str, msgspec.Meta(pattern=PATTERN)]

#: Called with the number of bytes done since the previous call.
Progress = Callable[[int], None]

# Large enough that hashing dominates, small enough that progress advances; hashlib releases the GIL from 2 KiB on.
CHUNK_SIZE_BYTES: Final = 1 << 20


def is_digest(text: str) -> bool:
    """Whether `text` is a well-formed digest."""
    return re.search(PATTERN, text) is not None


def parse_digest(text: str) -> str:
    """Returns `text` if it is a digest."""
    if not is_digest(text):
        raise DigestInvalid(text)
    return text


def digest_hex(digest: str) -> str:
    """Returns the 64 hexadecimal digits of a digest."""
    return parse_digest(digest).removeprefix(PREFIX)


def sha256_bytes(data: bytes | memoryview) -> str:
    """Computes the digest of bytes in memory."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def sha256_stream(stream: FileIO, progress: Progress | None = None) -> str:
    """Computes the digest of the rest of an open file. Releases the GIL while it hashes."""
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_SIZE_BYTES))
    while count := stream.readinto(buffer):
        sha256.update(buffer[:count])
        if progress is not None:
            progress(count)
    return PREFIX + sha256.hexdigest()


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """Computes the digest of a file. Releases the GIL while it hashes."""
    with path.open("rb", buffering=0) as stream:
        return sha256_stream(stream, progress)


def canonical_json(value: Any) -> bytes:
    """Writes canonical JSON (RFC 8785): equal values give equal bytes.

    Raises ValueError for NaN, an infinity, an integer beyond ±(2**53 - 1), or a type that JSON does not have.
    """
    return rfc8785.dumps(value)
