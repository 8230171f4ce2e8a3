"""Bundles that the stacks of a run share: the first that asks compiles, the others import what it made."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bundle.digest import canonical_json, sha256_bytes, sha256_file
from bundle.store.layout import Layout
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier
from compiler_svc.planning.code_digest import digest_bundle_code


class SharedBundles:
    """A layout beside the stores of all stacks, and by action digest the bundle that it holds.

    Any worker of a run may ask at any time; while one compiles, others that need the same bundle wait.
    """

    def __init__(self, directory: Path) -> None:
        self.layout = Layout.create(directory / "layout")
        self._records = directory

    @contextmanager
    def claim(self, action_digest: str) -> Iterator[tuple[str | None, Callable[[Layout, str], None]]]:
        """Gives the digest of an action's bundle, or None and a function that adds the bundle from a store."""
        record = self._records / action_digest
        with record.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

            def add(store: Layout, digest: str) -> None:
                copy_bundle(store, self.layout, digest, verifier=BlobVerifier(None))
                record.write_text(digest)

            yield (record.read_text() if record.exists() else None), add


def digest_action(model: Path, config: Mapping[str, Any], level: int) -> str:
    """Digest of what a test's bundle depends on: the code, the checkpoint's files, the configuration, the level."""
    files = {path.name: sha256_file(path) for path in sorted(model.iterdir()) if path.is_file()}
    inputs = {"code": digest_bundle_code(), "files": files, "config": dict(config), "level": level}
    return sha256_bytes(canonical_json(inputs))
