"""Imports, deletes and collects again and again, each time in a child that kills itself some calls later than the last.

    python -m tests.system.compiler_svc.import_until_killed DIRECTORY STEP

Child N is killed before its call N, and works in DIRECTORY/N, a copy of DIRECTORY/before. N goes up by STEP. The last
child comes to its end; its number is printed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from bundle.layout import Layout
from bundle.verification import BlobVerifier
from compiler_svc.bundles.importer import BundleImporter, ImportOrder
from compiler_svc.bundles.store import BundleStore
from compiler_svc.database.engine import Database

WRITING_MODULES = {"bundle.blob_writer", "bundle.layout"}
CALLS = {"pathlib": {"open", "rename", "replace", "unlink"}, "sqlalchemy.engine.default": {"execute", "commit"}}


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


def kill_after(calls: int) -> None:
    """Makes this process kill itself before the given call of any of its threads."""
    remaining = calls

    def count(frame: FrameType, event: str, function: object) -> None:
        nonlocal remaining
        module = frame.f_globals.get("__name__", "")
        if event != "c_call" or not (module in WRITING_MODULES or module in CALLS):
            return
        if module in WRITING_MODULES or getattr(function, "__name__", "") in CALLS[module]:
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


def main(directory: Path, step: int) -> None:
    os.fsync = abs  # see tests.service.bundle.act_until_killed
    calls = 0
    while True:
        home = directory / str(calls)
        shutil.copytree(directory / "before", home)
        child = os.fork()
        if child == 0:
            kill_after(calls)
            asyncio.run(work(home, directory / "source"))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code != -signal.SIGKILL:
            sys.stdout.write(f"{calls}\n")
            sys.exit(exit_code)
        calls += step


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
