"""NEFFs as neuronx-cc writes them: the header of 1024 bytes, and a tar archive in gzip."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

from bundle.neff import HEADER, HEADER_SIZE_BYTES

#: Position of each field that tests change, in `HEADER`.
FIELDS = {"pkg_version": 0, "header_size": 1, "data_size": 2, "neff_version_major": 3, "lnc_size": 13}


def pack_archive(files: Mapping[str, bytes]) -> bytes:
    """The archive of a NEFF. Its blocks are stored, not deflated, so that C code reads them without a library."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(archive.getvalue(), compresslevel=0, mtime=0)


def pack_header(data: bytes, **fields: int) -> bytes:
    """The header of a NEFF whose archive is `data`; `fields` are otherwise than neuronx-cc writes them."""
    values: list[Any] = [2, HEADER_SIZE_BYTES, len(data), 2, 0, b"", 1, bytes(32), bytes(16), b"file.neff", 0, b"", 0]
    values += [2, b""]
    for name, value in fields.items():
        values[FIELDS[name]] = value
    return HEADER.pack(*values)


def make_neff(
    files: Mapping[str, bytes] | None = None,
    *,
    architecture: str = "cayman",
    version: str = "2.26",
    fields: Mapping[str, int] | None = None,
) -> bytes:
    """A whole NEFF.

    Args:
        files: Files of the archive besides those that name cores and compiler.
        fields: Fields of the header that are otherwise.
    """
    described = {
        "./sg00/PE.bin": b"engine program",
        "./kelf-0.json": json.dumps({"target": architecture, "graphs": ["sg00"]}).encode(),
        "./info.json": json.dumps({"tool_version": version}).encode(),
    }
    data = pack_archive(described | dict(files or {}))
    return pack_header(data, **(fields or {})) + data
