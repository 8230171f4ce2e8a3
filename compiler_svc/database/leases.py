"""Leases of bundles in the database. Functions take the session of the caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from compiler_svc.database.tables import LeaseRow

#: Holder of the leases that keep a bundle from the end of its build until a version names it.
BUILD_HOLDER: Final = "kiln/build"
#: Longer than a restart of the compiler takes. If no version names a built bundle, it stays in the store that long.
BUILD_DURATION_S: Final = 3600.0


@dataclass(frozen=True)
class Lease:
    """A holder's claim on a bundle, until a time."""

    holder: str
    digest: str
    expire_time_ns: int


def set_lease(session: Session, *, holder: str, digest: str, duration_s: float) -> Lease:
    """Leases a bundle from now on, or renews the holder's lease on it."""
    lease = Lease(holder, digest, time.time_ns() + round(duration_s * 1e9))
    # Writes before it reads, because build processes also write leases and could do so in between.
    session.execute(delete(LeaseRow).where(LeaseRow.holder == holder, LeaseRow.digest == digest))
    session.add(LeaseRow(holder=holder, digest=digest, expire_time_ns=lease.expire_time_ns))
    return lease


def release_leases(session: Session, *, holder: str, digest: str) -> int:
    """Ends a lease, or all leases of a holder if `digest` is empty; returns how many had not expired."""
    _forget_expired(session)
    ended = delete(LeaseRow).where(LeaseRow.holder == holder)
    if digest:
        ended = ended.where(LeaseRow.digest == digest)
    return len(session.scalars(ended.returning(LeaseRow.digest)).all())


def list_leases(session: Session, digest: str = "") -> Sequence[Lease]:
    """Lists unexpired leases of one bundle, or of all bundles if `digest` is empty, by digest and holder."""
    _forget_expired(session)
    query = select(LeaseRow).order_by(LeaseRow.digest, LeaseRow.holder)
    if digest:
        query = query.where(LeaseRow.digest == digest)
    return [Lease(row.holder, row.digest, row.expire_time_ns) for row in session.scalars(query)]


def list_leased_digests(session: Session) -> frozenset[str]:
    """Digests of all leased bundles."""
    _forget_expired(session)
    return frozenset(session.scalars(select(LeaseRow.digest).distinct()))


def _forget_expired(session: Session) -> None:
    session.execute(delete(LeaseRow).where(LeaseRow.expire_time_ns <= time.time_ns()))
