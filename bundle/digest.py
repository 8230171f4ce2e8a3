"""Digests and the JSON that is hashed.

A digest is a plain string, `sha256:` and 64 lower-case hexadecimal digits. Digests from outside go through
`parse_digest` before they become part of a path.
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

#: A digest in a strict record.
Digest = Annotated[str, msgspec.Meta(pattern=PATTERN)]

#: Called with the number of bytes done since the previous call.
Progress = Callable[[int], None]

# Large enough that hashing dominates, small enough that progress moves; hashlib releases the GIL from 2 KiB on.
CHUNK_SIZE_BYTES: Final = 1 << 20


def is_digest(text: str) -> bool:
    """Whether `text` is a digest."""
    return re.search(PATTERN, text) is not None


def parse_digest(text: str) -> str:
    """Returns `text` where it is a digest.

    Raises:
        DigestInvalid: It is none.
    """
    if not is_digest(text):
        raise DigestInvalid(text)
    return text


def digest_hex(digest: str) -> str:
    """The 64 hexadecimal digits of a digest.

    Raises:
        DigestInvalid: `digest` is none.
    """
    return parse_digest(digest).removeprefix(PREFIX)


def sha256_bytes(data: bytes | memoryview) -> str:
    """Digest of bytes in memory."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def sha256_stream(stream: FileIO, progress: Progress | None = None) -> str:
    """Digest of the rest of an open file. Other threads run meanwhile."""
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_SIZE_BYTES))
    while count := stream.readinto(buffer):
        sha256.update(buffer[:count])
        if progress is not None:
            progress(count)
    return PREFIX + sha256.hexdigest()


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """Digest of a file. Other threads run meanwhile."""
    with path.open("rb", buffering=0) as stream:
        return sha256_stream(stream, progress)


def canonical_json(value: Any) -> bytes:
    """Canonical JSON (RFC 8785): equal values give equal bytes.

    Raises:
        ValueError: NaN, an infinity, an integer beyond ±(2**53 - 1), or a type that JSON does not have.
    """
    return rfc8785.dumps(value)
