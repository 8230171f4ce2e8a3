"""The file of a bundle's graphs: its format, and whether a bundle has one. Needs no torch.

The file is JSON lines, compressed by gzip. The first line is a `GraphsHeader`. For each executable, in manifest order,
a `GraphHeader` follows, then as many `compiler_svc.trace.annotated_graph.Operation` lines as it says.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable
from typing import Final

import msgspec

from bundle.errors import BundleError
from bundle.layout import Layout
from bundle.referrers import list_referrers, read_referrer

DEBUG_TYPE: Final = "application/vnd.kiln.debug.v1+gzip"
TITLE: Final = "graphs.jsonl.gz"


class GraphsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The bundle that the graphs belong to.

    Attributes:
        bundle: Digest of the bundle.
        code_digest: Digest of the compiler's sources that the lines refer to.
        executables: Number of graphs that follow.
    """

    bundle: str
    code_digest: str
    executables: int


class GraphHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of one graph.

    Attributes:
        executable: Tag of the executable.
        graph_digest: Graph digest in the bundle's manifest.
        operations: Number of lines that follow.
    """

    executable: str
    graph_digest: str
    operations: int


class GraphsWriter:
    """Collects the lines and compresses them: graphs of large models have many similar lines."""

    def __init__(self, header: GraphsHeader) -> None:
        """Begins with the header."""
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
    """Whether a bundle has its graphs, and they refer to lines of these sources."""
    try:
        files = [read_referrer(layout, one.digest) for one in list_referrers(layout, digest, DEBUG_TYPE)]
        return any(_read_header(file).code_digest == code_digest for file in files)
    except (BundleError, ValueError, OSError, EOFError):
        # The caller writes a broken file anew.
        return False


def _read_header(data: bytes) -> GraphsHeader:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return msgspec.json.decode(file.readline(1 << 16), type=GraphsHeader)
