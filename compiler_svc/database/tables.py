"""The database's tables. Times are nanoseconds since 1970 in UTC. JSON columns hold the records of `records`, `cache`
and `actuals`."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKeyConstraint, LargeBinary, String, false, true
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The base class of all tables."""

    type_annotation_map = {int: BigInteger, bytes: LargeBinary}  # noqa: RUF012 SQLAlchemy reads it from the class


class SchemaRow(Base):
    """The version of the tables, in one row; see `engine`."""

    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class OperationRow(Base):
    """One compile operation."""

    __tablename__ = "operations"

    operation_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    #: Bundle name of the request.
    name: Mapped[str]
    #: As `operations.find_by_request_id` writes it.
    request_id: Mapped[str | None] = mapped_column(unique=True)
    #: Digest of the request's content; a repeated request id must have the same.
    request_digest: Mapped[str]
    #: "running", "succeeded" or "failed".
    state: Mapped[str] = mapped_column(index=True)
    progress: Mapped[bytes]
    result: Mapped[bytes | None]
    error: Mapped[bytes | None]
    create_time_ns: Mapped[int] = mapped_column(index=True)
    update_time_ns: Mapped[int]
    #: The job spec (`planning.job_spec`), with which a restarted compiler resumes. None in rows of schema 1.
    spec: Mapped[bytes | None]
    #: 1, plus one for every restart.
    attempt: Mapped[int] = mapped_column(server_default="1")
    #: Number of builds that the compiler started but neither finished nor stopped in an orderly way.
    unfinished_builds: Mapped[int] = mapped_column(server_default="0")
    #: The latest of these builds.
    build_id: Mapped[str | None]
    #: Whether a client has cancelled the operation.
    is_cancelled: Mapped[bool] = mapped_column(server_default=false())
    #: Who publishes its bundle, see `names.Publisher`. Operations of schema 4 have no principal, and may take any name.
    principal: Mapped[str] = mapped_column(server_default="")
    takes_any_name: Mapped[bool] = mapped_column(server_default=true())


class CachedExecutableRow(Base):
    """Action digest of one executable → the executable that lowering made."""

    __tablename__ = "cached_executables"

    action_digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    blob: Mapped[str]
    record: Mapped[bytes]
    create_time_ns: Mapped[int]
    #: When a build last found the entry; 0 if none has.
    use_time_ns: Mapped[int] = mapped_column(server_default="0", default=0)


class CachedBundleRow(Base):
    """Action digest of a whole compile → bundle digest."""

    __tablename__ = "cached_bundles"

    action_digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    bundle_digest: Mapped[str]
    create_time_ns: Mapped[int]


class PlannedExecutableRow(Base):
    """Plan digest of one executable → the action digest that its tracing led to."""

    __tablename__ = "planned_executables"

    plan_digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    action_digest: Mapped[str] = mapped_column(String(80), index=True)


class LoweringActualRow(Base):
    """The cost of one lowering."""

    __tablename__ = "lowering_actuals"

    action_digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    target_kind: Mapped[str]
    optimization_level: Mapped[int]
    record: Mapped[bytes]
    create_time_ns: Mapped[int] = mapped_column(index=True)


class BuildActualRow(Base):
    """The cost of one build, besides its lowerings."""

    __tablename__ = "build_actuals"

    bundle_digest: Mapped[str] = mapped_column(String(80), primary_key=True)
    target_kind: Mapped[str]
    optimization_level: Mapped[int]
    record: Mapped[bytes]
    create_time_ns: Mapped[int] = mapped_column(index=True)


class FileDigestRow(Base):
    """Digest of a file that has not changed since."""

    __tablename__ = "file_digests"

    device: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    inode: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    size_bytes: Mapped[int]
    ctime_ns: Mapped[int]
    digest: Mapped[str]


class NameRow(Base):
    """A bundle name, whose it is, and the largest version number that it has ever had."""

    __tablename__ = "names"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    last_version: Mapped[int]
    #: A principal, see `Principal.key`. Names of schema 4 have none.
    owner: Mapped[str] = mapped_column(server_default="")


class VersionRow(Base):
    """One version: `name:vN` names `digest`."""

    __tablename__ = "versions"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(index=True)
    size_bytes: Mapped[int]
    graph_abi_digest: Mapped[str]
    create_time_ns: Mapped[int]
    #: The bundle's contents: "full", "executables", "weights" or "adapter".
    contents: Mapped[str] = mapped_column(server_default="full", default="full")
    #: What the bundle was made from: a checkpoint's path below its model root. None in rows of schema 3, and unknown.
    source: Mapped[str | None]


class AliasRow(Base):
    """A mutable name for a version."""

    __tablename__ = "aliases"
    __table_args__ = (ForeignKeyConstraint(["name", "version"], ["versions.name", "versions.version"]),)

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    alias: Mapped[str] = mapped_column(String(128), primary_key=True)
    version: Mapped[int]
    etag: Mapped[str]


class LeaseRow(Base):
    """A holder's claim on a bundle, until a time."""

    __tablename__ = "leases"

    holder: Mapped[str] = mapped_column(String(128), primary_key=True)
    digest: Mapped[str] = mapped_column(String(80), primary_key=True, index=True)
    expire_time_ns: Mapped[int]
