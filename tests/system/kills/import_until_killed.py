"""Imports, deletions and collections in children that kill themselves; see `tests.kill_points`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from bundle.store.layout import Layout
from bundle.store.verification import BlobVerifier
from compiler_svc.bundles.importer import BundleImporter, ImportOrder
from compiler_svc.bundles.store import BundleStore
from compiler_svc.database.engine import Database
from tests.kill_points import LAYOUT_CALLS, CountedCalls

CALLS: CountedCalls = {**LAYOUT_CALLS, "sqlalchemy.engine.default": {"execute", "commit"}}


def open_store(home: Path) -> tuple[Database, BundleStore]:
    layout = Layout.create(home / "store")
    database = Database(f"sqlite:///{home}/kiln.db")
    return database, BundleStore(database, layout)


async def work(home: Path, source: Path) -> None:
    """Moves an alias to an imported bundle, deletes what it named before, and collects."""
    database, store = open_store(home)
    importer = BundleImporter(store, roots=(source,), verifier=BlobVerifier(None))
    order = ImportOrder(layout=str(source), source_ref="", name="a", alias="prod", alias_etag=None)
    async for _ in importer.run(order):
        pass
    await store.lease("a:v1", holder="runtime", duration_s=3600)
    await store.delete("a:v1")
    await store.release_leases(holder="runtime", digest="")
    await store.collect_garbage()
    database.close()


def prepare(source: str) -> Callable[[Path], Callable[[], None]]:
    """Works in copies of a home with a store and a database."""
    return lambda home: lambda: asyncio.run(work(home, Path(source)))
