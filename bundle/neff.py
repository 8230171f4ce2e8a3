"""Reads what a NEFF says of itself: its header, and two of the files in its archive. Nothing here needs Neuron's tools.

A NEFF is a header of 1024 bytes and a tar archive, usually compressed with gzip (AWS's "Working with NEFF files";
offsets and names were checked on NEFFs that neuronx-cc 2.23 made for trn2). `kelf-0.json` names the cores it is for,
`info.json` the compiler. NEFFs come with bundles from elsewhere, so every length is bounded.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeVar, cast

import msgspec

from bundle.errors import NeffInvalid
from bundle.manifest import Executable, Manifest, Target

HEADER_SIZE_BYTES: Final = 1024
#: pkg_version, header_size, data_size, neff_version_major, neff_version_minor, neff_build_version, num_tpb, hash, uuid,
#: name, requested_tpb_count, tpb_per_node, feature_bits, lnc_size, padding.
HEADER: Final = struct.Struct("<5Q128sI32s16s256sI64sQI468s")

#: The archive's files: one for each engine and physical core, and descriptions.
MAX_MEMBERS: Final = 100_000
MAX_UNPACKED_BYTES: Final = 4 << 30
#: Size of a file that is parsed.
MAX_DOCUMENT_BYTES: Final = 64 << 20

_KELF: Final = "kelf-0.json"
_INFO: Final = "info.json"
_BLOCK_BYTES: Final = 512
_CHUNK_BYTES: Final = 1 << 20
_GZIP_MAGIC: Final = b"\x1f\x8b"

_DocumentT = TypeVar("_DocumentT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeffFacts:
    """What a NEFF says of itself.

    `lnc` is the physical cores of the logical core that it runs on; `architecture` the generation of cores, such as
    `cayman` (trn2); `compiler_version` that of neuronx-cc, empty if the NEFF does not say.
    """

    lnc: int
    architecture: str
    compiler_version: str


def read_neff(path: Path, tag: str) -> NeffFacts:
    """Reads the header and the archive of a NEFF up to the files that count."""
    with path.open("rb") as file:
        lnc = _read_header(file, path.stat().st_size, tag)
        documents = _read_documents(file, tag)
    kelf = _parse(documents, _KELF, _Kelf, tag)
    info = _parse(documents, _INFO, _Info, tag) if _INFO in documents else _Info()
    return NeffFacts(lnc=lnc, architecture=kelf.target, compiler_version=info.tool_version)


def check_neffs(manifest: Manifest, blob_path: Callable[[str], Path]) -> None:
    """Checks that the NEFFs of a bundle are whole, and made for the cores that its manifest names."""
    checked = set()
    for executable in manifest.executables:
        if executable.neff is not None and executable.blob not in checked:
            checked.add(executable.blob)
            check_neff(executable, manifest.target, blob_path(executable.blob))


def check_neff(executable: Executable, target: Target, path: Path) -> None:
    """Checks one NEFF as `check_neffs` does."""
    facts = read_neff(path, executable.tag)
    if facts.lnc != target.lnc:
        raise NeffInvalid(executable.tag, "lnc_size", str(facts.lnc), f"{target.lnc}, as target.lnc says")
    if facts.architecture != target.architecture:
        accepted = f"{target.architecture!r}, as target.architecture says"
        raise NeffInvalid(executable.tag, f"{_KELF}: target", repr(facts.architecture), accepted)


class _Kelf(msgspec.Struct):
    target: str


class _Info(msgspec.Struct):
    tool_version: str = ""


def _read_header(file: IO[bytes], file_size: int, tag: str) -> int:
    data = file.read(HEADER_SIZE_BYTES)
    if len(data) < HEADER_SIZE_BYTES:
        accepted = f"at least {HEADER_SIZE_BYTES} bytes, the size of a NEFF's header"
        raise NeffInvalid(tag, "size", f"{file_size} bytes", accepted)
    _, header_size, data_size, *_, lnc, _ = HEADER.unpack(data)
    if header_size != HEADER_SIZE_BYTES:
        raise NeffInvalid(tag, "header_size", str(header_size), str(HEADER_SIZE_BYTES))
    if header_size + data_size != file_size:
        accepted = f"{file_size - header_size}, what the file has behind its header"
        raise NeffInvalid(tag, "data_size", str(data_size), accepted)
    # NEFFs for cores that cannot be joined may leave the field empty.
    return max(1, cast("int", lnc))


def _read_documents(file: IO[bytes], tag: str) -> dict[str, bytes]:
    begin = file.tell()
    is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(begin)
    found: dict[str, bytes] = {}
    try:
        stream = cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if is_compressed else file
        for name, content in _read_members(stream, {_KELF, _INFO}, tag):
            found.setdefault(name, content)
            if len(found) == len({_KELF, _INFO}):
                break
    except (OSError, EOFError, zlib.error) as error:
        raise NeffInvalid(tag, "archive", type(error).__name__, "a tar archive, perhaps in gzip") from error
    return found


def _read_members(stream: IO[bytes], wanted: set[str], tag: str) -> Iterator[tuple[str, bytes]]:
    """Yields the wanted regular files of a tar archive, which may lie in any folder.

    `tarfile` would hold what an archive calls a long name in memory, however long.
    """
    unpacked_bytes = 0
    for _ in range(MAX_MEMBERS):
        block = _read_exactly(stream, _BLOCK_BYTES, tag)
        if not block.strip(b"\0"):
            return
        if block[257:262] != b"ustar" or not _has_right_sum(block):
            raise NeffInvalid(tag, "archive", "a block that begins no file", "a tar archive, perhaps in gzip")
        size = _parse_octal(block[124:136], tag)
        padded = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        unpacked_bytes += _BLOCK_BYTES + padded
        if unpacked_bytes > MAX_UNPACKED_BYTES:
            raise NeffInvalid(tag, "archive", "more bytes", f"at most {MAX_UNPACKED_BYTES} when unpacked")
        name = block[:100].partition(b"\0")[0].decode(errors="replace").rpartition("/")[2]
        is_wanted = block[156:157] in (b"0", b"\0") and name in wanted
        if is_wanted and size > MAX_DOCUMENT_BYTES:
            raise NeffInvalid(tag, name, f"{size} bytes", f"at most {MAX_DOCUMENT_BYTES}")
        if is_wanted:
            yield name, _read_exactly(stream, padded, tag)[:size]
        else:
            for begin in range(0, padded, _CHUNK_BYTES):
                _read_exactly(stream, min(_CHUNK_BYTES, padded - begin), tag)
    raise NeffInvalid(tag, "archive", "more files", f"at most {MAX_MEMBERS}")


def _read_exactly(stream: IO[bytes], size: int, tag: str) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise NeffInvalid(tag, "archive", "its end inside a file", "a whole tar archive")
    return data


def _has_right_sum(block: bytes) -> bool:
    # The sum is of a header with spaces in place of the sum, in octal digits.
    stated = block[148:156].strip(b"\0 ")
    return stated == f"{sum(block[:148]) + 8 * ord(' ') + sum(block[156:]):0{len(stated)}o}".encode()


def _parse_octal(field: bytes, tag: str) -> int:
    text = field.strip(b"\0 ")
    if not text.isdigit() or set(text) & set(b"89"):
        raise NeffInvalid(tag, "archive", "a file whose size is no octal number", "files of less than 8 GiB")
    return int(text, 8)


def _parse(documents: dict[str, bytes], name: str, record: type[_DocumentT], tag: str) -> _DocumentT:
    if name not in documents:
        raise NeffInvalid(tag, name, "no such file", "one in the archive")
    try:
        return msgspec.json.decode(documents[name], type=record)
    except (ValueError, RecursionError) as error:
        raise NeffInvalid(tag, name, "another form", "JSON with the field target or tool_version as text") from error
