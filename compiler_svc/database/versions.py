"""Versions and aliases in the database. Functions take the session of the caller's transaction."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal, cast

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from bundle.errors import BundleNotFound
from bundle.reference import Reference, list_aliases_of_tag
from bundle.store.tags import WrittenTag
from compiler_svc.database.names import UNOWNED, Publisher, claim_name
from compiler_svc.database.tables import AliasRow, VersionRow
from compiler_svc.errors import AliasChanged, AliasIncompatible, AliasNotFound, BundleInUse, TagAmbiguous

#: How many versions and aliases an error lists.
MAX_LISTED: Final = 8
#: The parts that a bundle has.
Contents = Literal["full", "executables", "weights", "adapter"]


@dataclass(frozen=True)
class Version:
    """The name `name:vN`, the bundle that it names, and the aliases that name this version, sorted."""

    name: str
    version: int
    digest: str
    size_bytes: int
    graph_abi_digest: str
    create_time_ns: int
    contents: Contents
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class Alias:
    """A mutable name for a version. Its etag changes whenever it moves."""

    name: str
    alias: str
    version: int
    etag: str


@dataclass(frozen=True)
class MovedAlias:
    """An alias as it has been set, and what that means for those who follow it, one sentence each."""

    alias: Alias
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageOfVersions:
    """A page of versions by name, then newest first, and the key of the next page."""

    versions: tuple[Version, ...]
    next_key: tuple[str, int] | None


def add_version(
    session: Session,
    *,
    name: str,
    digest: str,
    size_bytes: int,
    graph_abi_digest: str,
    contents: Contents = "full",
    source: str | None = None,
    publisher: Publisher = UNOWNED,
) -> Version:
    """Gives a bundle the next version number, or returns the name's newest version if it already names the bundle.

    A new name is the publisher's from then on. `source` is what the bundle was made from, such as a checkpoint's path
    below its model root; None if unknown.
    """
    counter = claim_name(session, name, publisher)
    newest = _newest(session, name)
    if newest is not None and newest.digest == digest:
        return _read(session, newest)
    counter.last_version += 1
    row = VersionRow(
        name=name,
        version=counter.last_version,
        digest=digest,
        size_bytes=size_bytes,
        graph_abi_digest=graph_abi_digest,
        create_time_ns=time.time_ns(),
        contents=contents,
        source=source,
    )
    session.add(row)
    session.flush()
    return _read(session, row)


def find_version(session: Session, reference: Reference) -> Version:
    """Resolves a reference. A digest finds the newest version that names it."""
    row = _find_row(session, reference)
    if row is None:
        raise BundleNotFound(str(reference), _describe_versions(session, reference.name) if reference.name else "")
    return _read(session, row)


def _describe_versions(session: Session, name: str) -> str:
    """Says which versions and aliases a name has, or, if it has none, which names are like it."""
    numbers = session.scalars(
        select(VersionRow.version).where(VersionRow.name == name).order_by(VersionRow.version.desc())
    ).all()
    if not numbers:
        similar = " or ".join(get_close_matches(name, session.scalars(select(VersionRow.name).distinct())))
        return "no bundle has that name" + (f"; did you mean {similar}?" if similar else "")
    aliases = session.scalars(select(AliasRow.alias).where(AliasRow.name == name).order_by(AliasRow.alias)).all()
    listed = [*(f"v{number}" for number in numbers), *(f"@{alias}" for alias in aliases)]
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return f"{name} has {', '.join(listed[:MAX_LISTED])}{more}"


def list_versions(session: Session, *, name: str, page_size: int, after: tuple[str, int] | None) -> PageOfVersions:
    """Lists versions by name, then newest first, those of all names if `name` is empty. `after` is the `next_key` of
    the page before.
    """
    query = select(VersionRow).order_by(VersionRow.name, VersionRow.version.desc())
    if name:
        query = query.where(VersionRow.name == name)
    if after is not None:
        last_name, last_version = after
        older = and_(VersionRow.name == last_name, VersionRow.version < last_version)
        query = query.where(or_(VersionRow.name > last_name, older))
    rows = session.scalars(query.limit(page_size + 1)).all()
    page = tuple(_read(session, row) for row in rows[:page_size])
    more = len(rows) > page_size
    return PageOfVersions(page, (page[-1].name, page[-1].version) if more else None)


def delete_version(session: Session, reference: Reference) -> Version:
    """Removes a version. Its number is never used again."""
    version = find_version(session, reference)
    if version.aliases:
        raise BundleInUse(str(reference), version.aliases)
    session.delete(session.get_one(VersionRow, (version.name, version.version)))
    return version


def list_named_digests(session: Session) -> frozenset[str]:
    """Digests of all bundles that have a version."""
    return frozenset(session.scalars(select(VersionRow.digest).distinct()))


def set_alias(
    session: Session, *, reference: Reference, alias: str, etag: str | None, require_compatible: bool = False
) -> MovedAlias:
    """Points an alias at a version, creating or moving it.

    `etag` is the alias's expected etag; empty if the alias must not exist; None skips the check. `require_compatible`
    refuses a version with another graph ABI than the alias names; otherwise a warning says so.
    """
    version = find_version(session, reference)
    check_alias(session, version.name, alias, etag)
    row = session.get(AliasRow, (version.name, alias))
    warnings: tuple[str, ...] = ()
    if row is None:
        row = AliasRow(name=version.name, alias=alias, version=version.version, etag=_new_etag())
        session.add(row)
    elif row.version != version.version:
        named = session.get_one(VersionRow, (row.name, row.version))
        if named.graph_abi_digest != version.graph_abi_digest:
            misfit = AliasIncompatible(f"{row.name}@{alias}", _describe_abi(named), _describe_abi(version))
            if require_compatible:
                raise misfit
            warnings = (str(misfit),)
        row.version, row.etag = version.version, _new_etag()
    return MovedAlias(Alias(row.name, row.alias, row.version, row.etag), warnings)


def _describe_abi(version: Version | VersionRow) -> tuple[str, str]:
    return f"{version.name}:v{version.version}", version.graph_abi_digest


def list_tags(session: Session) -> list[WrittenTag]:
    """Lists the tags of all versions and aliases."""
    rows = {(row.name, row.version): row for row in session.scalars(select(VersionRow))}
    named = [(row, Reference(name=row.name, version=row.version)) for row in rows.values()]
    aliases = session.scalars(select(AliasRow))
    named += [(rows[one.name, one.version], Reference(name=one.name, alias=one.alias)) for one in aliases]
    return [WrittenTag(reference, row.digest, row.version, row.source) for row, reference in named]


def list_refs(session: Session, digests: Collection[str]) -> Sequence[str]:
    """Lists references of the versions that name any of these bundles."""
    rows = session.scalars(select(VersionRow).order_by(VersionRow.name, VersionRow.version))
    return [f"{row.name}:v{row.version}" for row in rows if row.digest in digests]


def check_alias(session: Session, name: str, alias: str, etag: str | None) -> None:
    """Checks that an alias has an etag, or does not exist if the etag is empty; and that the tag of a new alias is its
    own.
    """
    row = session.get(AliasRow, (name, alias))
    _check_etag(name, alias, etag, row)
    if row is None:
        tag = Reference(name=name, alias=alias).tag
        for other in list_aliases_of_tag(tag):
            if session.get(AliasRow, (other.name, other.alias)) is not None:
                raise TagAmbiguous(alias, tag, str(other))


def delete_alias(session: Session, *, name: str, alias: str, etag: str | None) -> None:
    """Removes an alias."""
    row = session.get(AliasRow, (name, alias))
    if row is None:
        raise AliasNotFound(name, alias)
    _check_etag(name, alias, etag, row)
    session.delete(row)


def list_aliases(session: Session, name: str) -> Sequence[Alias]:
    """Lists aliases of one bundle name, or of all if `name` is empty, by name."""
    query = select(AliasRow).order_by(AliasRow.name, AliasRow.alias)
    if name:
        query = query.where(AliasRow.name == name)
    return [Alias(row.name, row.alias, row.version, row.etag) for row in session.scalars(query)]


def _find_row(session: Session, reference: Reference) -> VersionRow | None:
    if reference.digest is not None:
        by_digest = select(VersionRow).where(VersionRow.digest == reference.digest)
        return session.scalar(by_digest.order_by(VersionRow.create_time_ns.desc()).limit(1))
    assert reference.name is not None
    if reference.version is not None:
        return session.get(VersionRow, (reference.name, reference.version))
    if reference.alias is not None:
        alias = session.get(AliasRow, (reference.name, reference.alias))
        return None if alias is None else session.get(VersionRow, (alias.name, alias.version))
    return _newest(session, reference.name)


def _newest(session: Session, name: str) -> VersionRow | None:
    query = select(VersionRow).where(VersionRow.name == name)
    return session.scalar(query.order_by(VersionRow.version.desc()).limit(1))


def _check_etag(name: str, alias: str, etag: str | None, row: AliasRow | None) -> None:
    actual = "" if row is None else row.etag
    if etag is not None and etag != actual:
        raise AliasChanged(name, alias, etag, actual)


def _new_etag() -> str:
    return secrets.token_hex(8)


def _read(session: Session, row: VersionRow) -> Version:
    aliases = select(AliasRow.alias).where(AliasRow.name == row.name, AliasRow.version == row.version)
    return Version(
        name=row.name,
        version=row.version,
        digest=row.digest,
        size_bytes=row.size_bytes,
        graph_abi_digest=row.graph_abi_digest,
        create_time_ns=row.create_time_ns,
        contents=cast("Contents", row.contents),
        aliases=tuple(session.scalars(aliases.order_by(AliasRow.alias))),
    )
