"""The file of a bundle's graphs: its format, and whether a bundle has one. Needs no torch.

The file is JSON lines, compressed by gzip. The first line is a `GraphsHeader`. For each executable, in manifest order,
a `GraphHeader` follows, then as many `compiler_svc.trace.annotated_graph.Operation` lines as it says.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from bundle.errors import BundleError
from bundle.store.layout import Layout
from bundle.store.referrers import list_referrers, read_referrer

DEBUG_TYPE: Final = "application/vnd.kiln.debug.v1+gzip"
TITLE: Final = "graphs.jsonl.gz"


class GraphsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The bundle of the graphs, the digest of the sources that their lines refer to, and the number of graphs."""

    bundle: str
    code_digest: str
    executables: int


class GraphHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of one graph, and the number of `operations`, one a line, that follow."""

    executable: str
    graph_digest: str
    operations: int


class GraphsWriter:
    """Collects the lines and compresses them: graphs of large models have many similar lines."""

    def __init__(self, header: GraphsHeader) -> None:
        self._data = io.BytesIO()
        # Without a time in the file, equal lines give equal bytes.
        self._file = gzip.GzipFile(filename="", mode="wb", fileobj=self._data, mtime=0)
        self._write(header)

    def add(self, header: GraphHeader, operations: Iterable[msgspec.Struct]) -> None:
        """Appends one graph."""
        self._write(header)
        for operation in operations:
            self._write(operation)

    def finish(self) -> bytes:
        """Ends the file and returns all of its bytes."""
        self._file.close()
        return self._data.getvalue()

    def _write(self, record: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")


def has_graphs(layout: Layout, digest: str, code_digest: str) -> bool:
    """Whether a bundle has its graphs, and they refer to lines of these sources. Files that are broken do not count."""
    with suppress(BundleError, OSError):
        return any(
            _find_code_digest(layout, one.digest) == code_digest for one in list_referrers(layout, digest, DEBUG_TYPE)
        )
    return False


def _find_code_digest(layout: Layout, referrer: str) -> str | None:
    with suppress(BundleError, ValueError, OSError, EOFError):
        return _read_header(read_referrer(layout, referrer)).code_digest
    return None


def _read_header(data: bytes) -> GraphsHeader:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return msgspec.json.decode(file.readline(1 << 16), type=GraphsHeader)
