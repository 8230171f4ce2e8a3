"""The compiler's store after a death: its database is sound, its bundles are whole, and nothing else is in it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bundle.store.layout import Layout
from bundle.store.oci import BUNDLE_TYPE
from bundle.store.reader import open_bundle
from bundle.store.verification import BlobVerifier


def check_store(home: Path) -> set[str]:
    """Makes sure that the database is sound and every bundle whole; returns their digests."""
    with sqlite3.connect(home / "store" / "kiln.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    layout = Layout(home / "store")
    digests = {entry.digest for entry in layout.read_index().manifests if entry.artifact_type == BUNDLE_TYPE}
    for digest in digests:
        open_bundle(layout, digest).verify(BlobVerifier(None))
    return digests


def list_needed_blobs(home: Path) -> set[str]:
    """Paths below the store of all blobs that the index names, and that these name."""
    layout = Layout(home / "store")
    waiting = [entry.digest for entry in layout.read_index().manifests]
    needed: set[str] = set()
    while waiting:
        digest = waiting.pop()
        path = layout.blob_path(digest)
        if digest not in needed and path.stat().st_size < 1 << 20:
            waiting += _list_digests(path.read_bytes())
        needed.add(digest)
    return {str(layout.blob_path(digest).relative_to(layout.root)) for digest in needed}


def _list_digests(data: bytes) -> Iterator[str]:
    """Digests of the descriptors of an OCI manifest or index; none if the bytes are no such document."""
    try:
        document = json.loads(data)
    except ValueError:
        return
    if isinstance(document, dict) and "schemaVersion" in document:
        entries: list[Any] = [document.get("config"), *document.get("layers", ()), *document.get("manifests", ())]
        yield from (entry["digest"] for entry in entries if entry is not None)
