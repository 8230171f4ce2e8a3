"""The action cache: results by action digest. Functions take the session of the caller's transaction.

The service writes entries only after a whole compile has succeeded, including its golden check, so that a failure never
poisons the cache. An entry does not prove that the store still holds the blob: callers have to check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from bundle.abi.neff import NeffProgram
from bundle.manifest import FormatName, StateConvention
from compiler_svc.database.tables import CachedBundleRow, CachedExecutableRow, PlannedExecutableRow


class CachedExecutable(msgspec.Struct, frozen=True, kw_only=True):
    """The executable that lowering made from a graph, of whose parameters it needs tensors for `constants`."""

    blob: str
    size_bytes: int
    format: FormatName
    state_convention: StateConvention
    constants: tuple[str, ...]
    neff: NeffProgram | None = None


def find_executable(session: Session, action_digest: str) -> CachedExecutable | None:
    """Finds the result of an action; None if the cache has none."""
    row = session.get(CachedExecutableRow, action_digest)
    if row is None:
        return None
    # An update, not an assignment to the row: a collection may have removed the row meanwhile, which is no error.
    used = update(CachedExecutableRow).where(CachedExecutableRow.action_digest == action_digest)
    session.execute(used.values(use_time_ns=time.time_ns()))
    return msgspec.json.decode(row.record, type=CachedExecutable)


def remember_executables(session: Session, executables: Mapping[str, CachedExecutable]) -> None:
    """Records the results of actions, by action digest. Newer results replace older ones."""
    for action_digest, executable in executables.items():
        session.merge(
            CachedExecutableRow(
                action_digest=action_digest,
                blob=executable.blob,
                record=msgspec.json.encode(executable),
                create_time_ns=time.time_ns(),
            )
        )


def list_executable_blobs(session: Session, *, used_since_ns: int) -> frozenset[str]:
    """Lists blobs of executables that builds made or found at or after a time."""
    used = or_(CachedExecutableRow.create_time_ns >= used_since_ns, CachedExecutableRow.use_time_ns >= used_since_ns)
    return frozenset(session.scalars(select(CachedExecutableRow.blob).where(used)))


def forget_lost(session: Session, *, has_blob: Callable[[str], bool], has_bundle: Callable[[str], bool]) -> None:
    """Removes executables and bundles that the store no longer holds, and plans that led to them."""
    for executable in session.scalars(select(CachedExecutableRow)):
        if not has_blob(executable.blob):
            session.delete(executable)
    for bundle in session.scalars(select(CachedBundleRow)):
        if not has_bundle(bundle.bundle_digest):
            session.delete(bundle)
    session.flush()
    listed = select(CachedExecutableRow.action_digest)
    session.execute(delete(PlannedExecutableRow).where(PlannedExecutableRow.action_digest.not_in(listed)))


def find_bundle(session: Session, action_digest: str) -> str | None:
    """Finds the digest of the bundle that an action made; None if the cache has none."""
    row = session.get(CachedBundleRow, action_digest)
    return None if row is None else row.bundle_digest


def remember_bundle(session: Session, action_digest: str, bundle_digest: str) -> None:
    """Records the bundle that an action made. A newer bundle replaces an older one."""
    session.merge(
        CachedBundleRow(action_digest=action_digest, bundle_digest=bundle_digest, create_time_ns=time.time_ns())
    )
