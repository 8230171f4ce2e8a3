"""Bundle names in the database, and whose each is. Functions take the session of the caller's transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from compiler_svc.database.tables import NameRow
from compiler_svc.errors import NameOwned
from edge.access.principal import Principal, Scope


@dataclass(frozen=True, slots=True)
class Publisher:
    """Who publishes bundles under a name; with `takes_any`, under names of others, too."""

    principal: str
    takes_any: bool

    @classmethod
    def of(cls, principal: Principal) -> Self:
        """Returns what a principal may, whose patterns admit the name if it has any."""
        return cls(principal.key, Scope.ADMIN in principal.scopes or principal.bundles is not None)


#: Publishes for no principal, under any name, as callers without a token do.
UNOWNED: Final = Publisher("", takes_any=True)


def claim_name(session: Session, name: str, publisher: Publisher) -> NameRow:
    """Locks a name until the transaction ends. A name that is new belongs to the publisher from then on."""
    row = _lock_name(session, name, publisher.principal)
    _check_owner(row, publisher)
    return row


def check_name(session: Session, name: str, publisher: Publisher) -> None:
    """Checks that a publisher may use a name."""
    row = session.get(NameRow, name)
    if row is not None:
        _check_owner(row, publisher)


def give_name(session: Session, name: str, owner: str) -> str:
    """Makes a name belong to a principal, or to none if `owner` is empty; returns its former owner. The name may be
    new, and is the owner's to publish under then.
    """
    row = _lock_name(session, name, "")
    former, row.owner = row.owner, owner
    return former


def _lock_name(session: Session, name: str, owner: str) -> NameRow:
    # The first statement of a transaction that writes: of two that want a new name, one waits here for the other.
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    session.execute(insert(NameRow).values(name=name, last_version=0, owner=owner).on_conflict_do_nothing())
    return session.get_one(NameRow, name, with_for_update=True)


def _check_owner(row: NameRow, publisher: Publisher) -> None:
    if row.owner != publisher.principal and not publisher.takes_any:
        raise NameOwned(row.name)
