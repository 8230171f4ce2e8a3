"""Errors of the compiler service.

CompilerError
├── ConfigInvalid             a configuration with mistakes, all of them listed
├── FeatureNotServed          a configuration or target that the API knows but this version does not serve
├── NameInvalid               text that is not a bundle name
├── NameOwned                 a bundle name that is another principal's
├── OwnerInvalid              text that is no principal's name
├── PathOutsideModelRoots     a model path that leaves the configured roots
├── RequestIdReused           a request id that belongs to another request
├── CompileQueueFull          more compiles than the queue holds
├── OperationNotFound         a name that no operation has
├── OperationNotDone          an operation that is still running, in a request for a finished one
├── PageTokenInvalid          a page token that this service did not give out
├── FilterInvalid             a list filter that this service does not know
├── OffsetInvalid             an offset outside a blob
├── AliasInvalid              text that is not an alias
├── TagAmbiguous              an alias whose tag another alias has
├── AliasNotFound             an alias that does not exist
├── AliasChanged              an alias that moved since its etag was read
├── AliasIncompatible         a version whose weights those who follow the alias cannot take
├── BundleInUse               a version that an alias still names
├── CompileCancelled          a compile that a client cancelled
├── CompilerRestarted         a compile that was interrupted too often, or cannot be resumed
├── BuildFailed               a build process that ended without a result
├── BuildStalled              a build process that computed nothing for too long, and was killed
├── GraphAbiMismatch          a checkpoint whose weights the executables of a bundle cannot take
├── ExecutablesMissing        a bundle without executables, in a request that needs them
├── TooManyWatchers           more watchers of one operation than are served
├── TooManyStreams            more open streams of one method than are served
├── StoreLocked               a store that another compiler serves
├── DatabaseUnavailable       a database that cannot be opened
└── DatabaseSchemaUnsupported a database whose tables a newer version made
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from bundle.errors import FieldViolation, KilnError
from bundle.reference import ACCEPTED_ALIAS, ACCEPTED_NAME

# A status travels in HTTP/2 headers, of which peers accept some 8 KiB.
_MAX_VIOLATIONS: Final = 16
_MAX_SUMMARIZED: Final = 4


class CompilerError(KilnError):
    """Root of the compiler service's errors."""

    reason = "COMPILER_ERROR"


class ConfigInvalid(CompilerError):
    """A configuration with mistakes, all of them listed."""

    reason = "CONFIG_INVALID"

    def __init__(self, violations: Iterable[FieldViolation]) -> None:
        listed = tuple(violations)
        super().__init__(_summarize("invalid configuration", listed), violations=listed[:_MAX_VIOLATIONS])


class FeatureNotServed(CompilerError):
    """A configuration or target that the API knows but this version does not serve."""

    reason = "FEATURE_NOT_SERVED"

    def __init__(self, violations: Iterable[FieldViolation]) -> None:
        listed = tuple(violations)
        features = ",".join(violation.field for violation in listed)
        super().__init__(_summarize("not served", listed), violations=listed[:_MAX_VIOLATIONS], features=features)


class NameInvalid(CompilerError):
    """Text that is not a bundle name, or a name whose tags would be ambiguous."""

    reason = "NAME_INVALID"

    def __init__(self, name: str) -> None:
        violation = FieldViolation("name", repr(name), ACCEPTED_NAME)
        super().__init__(str(violation), violations=(violation,), name=name)


class NameOwned(CompilerError):
    """A bundle name that another principal has, or that a release made which kept no owners."""

    reason = "NAME_OWNED"

    def __init__(self, name: str) -> None:
        accepted = "a name of the caller's or a new one, or with the scope admin or a pattern of the token any"
        violation = FieldViolation("name", repr(name), accepted)
        super().__init__(f"the name is not the caller's: {violation}", violations=(violation,), name=name)


class OwnerInvalid(CompilerError):
    """Text that is no principal's name."""

    reason = "OWNER_INVALID"

    def __init__(self, owner: str, limit: int) -> None:
        shown = repr(owner) if len(owner) <= limit else f"{len(owner)} characters"
        violation = FieldViolation("owner", shown, f"at most {limit} printable characters")
        super().__init__(str(violation), violations=(violation,))


class PathOutsideModelRoots(CompilerError):
    """A model path that leaves the configured roots."""

    reason = "PATH_OUTSIDE_MODEL_ROOTS"

    def __init__(self, path: str, model_roots: Sequence[Path], *, is_link: bool) -> None:
        detail = " (a link that leads outside of the model roots)" if is_link else ""
        roots = " or ".join(map(str, model_roots))
        accepted = (
            f"a directory below {roots} on the compiler's host, links followed; "
            "--model-root DIR of `kiln up`, or of the compiler, adds a root"
        )
        violation = FieldViolation("model", f"{path!r}{detail}", accepted)
        super().__init__(str(violation), violations=(violation,), path=path)


class RequestIdReused(CompilerError):
    """A request id that belongs to another request."""

    reason = "REQUEST_ID_REUSED"

    def __init__(self, request_id: str, operation: str) -> None:
        super().__init__(
            f"request_id {request_id!r} belongs to {operation}, whose request was another",
            request_id=request_id,
            operation=operation,
        )


class CompileQueueFull(CompilerError):
    """More compiles than the queue holds."""

    reason = "COMPILE_QUEUE_FULL"

    def __init__(self, queue_size: int, retry_after_s: float) -> None:
        super().__init__(
            f"{queue_size} compiles are waiting already", retry_after_s=retry_after_s, queue_size=queue_size
        )


class OperationNotFound(CompilerError):
    """A name that no operation has."""

    reason = "OPERATION_NOT_FOUND"

    def __init__(self, operation: str) -> None:
        super().__init__(f"no operation {operation!r}", operation=operation)


class OperationNotDone(CompilerError):
    """An operation that is still running, in a request for a finished one."""

    reason = "OPERATION_NOT_DONE"

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} is not done: cancel it or wait for it first", operation=operation)


class PageTokenInvalid(CompilerError):
    """A page token that this service did not give out."""

    reason = "PAGE_TOKEN_INVALID"

    def __init__(self, token: str) -> None:
        violation = FieldViolation("page_token", repr(token), "the next_page_token of the previous page, or empty")
        super().__init__(str(violation), violations=(violation,), page_token=token)


class FilterInvalid(CompilerError):
    """A list filter that this service does not know."""

    reason = "FILTER_INVALID"

    def __init__(self, text: str) -> None:
        violation = FieldViolation("filter", repr(text), "empty, done=true or done=false")
        super().__init__(str(violation), violations=(violation,), filter=text)


class OffsetInvalid(CompilerError):
    """An offset outside a blob."""

    reason = "OFFSET_INVALID"

    def __init__(self, offset_bytes: int, size_bytes: int) -> None:
        violation = FieldViolation("offset_bytes", str(offset_bytes), f"0 to {size_bytes}")
        super().__init__(str(violation), violations=(violation,), offset_bytes=offset_bytes, size_bytes=size_bytes)


class AliasInvalid(CompilerError):
    """Text that is not an alias, or an alias whose tag would be ambiguous."""

    reason = "ALIAS_INVALID"

    def __init__(self, alias: str) -> None:
        violation = FieldViolation("alias", repr(alias), ACCEPTED_ALIAS)
        super().__init__(str(violation), violations=(violation,), alias=alias)


class TagAmbiguous(CompilerError):
    """An alias whose tag in the store's index another alias has."""

    reason = "TAG_AMBIGUOUS"

    def __init__(self, alias: str, tag: str, other: str) -> None:
        violation = FieldViolation("alias", repr(alias), f"an alias whose tag is its own: {other} has the tag {tag}")
        super().__init__(str(violation), violations=(violation,), alias=alias, tag=tag, other=other)


class AliasNotFound(CompilerError):
    """An alias that does not exist."""

    reason = "ALIAS_NOT_FOUND"

    def __init__(self, name: str, alias: str) -> None:
        super().__init__(f"no alias {name}@{alias}", name=name, alias=alias)


class AliasChanged(CompilerError):
    """An alias that moved since its etag was read."""

    reason = "ALIAS_CHANGED"

    def __init__(self, name: str, alias: str, etag: str, actual: str) -> None:
        super().__init__(
            f"alias {name}@{alias} changed: its etag is {actual!r}, not {etag!r}",
            name=name,
            alias=alias,
            etag=etag,
            actual=actual,
        )


class AliasIncompatible(CompilerError):
    """A version with another graph ABI than the one that an alias names: deployments that follow it cannot take it."""

    reason = "ALIAS_INCOMPATIBLE"

    def __init__(self, alias: str, named: tuple[str, str], wanted: tuple[str, str]) -> None:
        super().__init__(
            f"{wanted[0]} has graph ABI {wanted[1]}, and {named[0]}, which {alias} named, has {named[1]}: "
            f"deployments that follow {alias} keep the weights that they have; load {wanted[0]} as a new deployment",
            alias=alias,
            named=named[0],
            named_graph_abi_digest=named[1],
            wanted=wanted[0],
            wanted_graph_abi_digest=wanted[1],
        )


class BundleInUse(CompilerError):
    """A version that an alias still names."""

    reason = "BUNDLE_IN_USE"

    def __init__(self, ref: str, aliases: Iterable[str]) -> None:
        listed = ", ".join(sorted(aliases))
        super().__init__(f"{ref} is named by alias {listed}", ref=ref, aliases=listed)


class CompileCancelled(CompilerError):
    """A compile that a client cancelled."""

    reason = "COMPILE_CANCELLED"

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} was cancelled", operation=operation)


class CompilerRestarted(CompilerError):
    """A compile that was interrupted too often, or cannot be resumed."""

    reason = "COMPILER_RESTARTED"

    def __init__(self, operation: str, detail: str) -> None:
        super().__init__(
            f"the compiler restarted while {operation} ran, and does not resume it: {detail}",
            operation=operation,
            detail=detail,
        )


class BuildFailed(CompilerError):
    """A build process that ended without a result."""

    reason = "BUILD_FAILED"

    def __init__(self, detail: str) -> None:
        super().__init__(f"the build failed: {detail}", detail=detail)


class BuildStalled(CompilerError):
    """A build process that computed nothing for too long, and was killed."""

    reason = "BUILD_STALLED"

    def __init__(self, idle_s: float) -> None:
        super().__init__(f"the build stalled: its process computed nothing for {idle_s:g} s", idle_s=f"{idle_s:g}")


class GraphAbiMismatch(CompilerError):
    """A checkpoint whose weights the executables of a bundle cannot take."""

    reason = "GRAPH_ABI_MISMATCH"

    def __init__(self, attribute: str, actual: object, expected: object) -> None:
        super().__init__(
            f"the weights do not fit the bundle's executables: {attribute} is {actual}, theirs is {expected}",
            attribute=attribute,
            actual=actual,
            expected=expected,
        )


class ExecutablesMissing(CompilerError):
    """A bundle without executables, in a request that needs them."""

    reason = "EXECUTABLES_MISSING"

    def __init__(self, ref: str) -> None:
        violation = FieldViolation("executables_ref", repr(ref), "a bundle with executables, not one of weights only")
        super().__init__(str(violation), violations=(violation,), ref=ref)


class TooManyWatchers(CompilerError):
    """More watchers of one operation than are served."""

    reason = "TOO_MANY_WATCHERS"

    def __init__(self, operation: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{limit} calls watch {operation} already", retry_after_s=retry_after_s, operation=operation, limit=limit
        )


class TooManyStreams(CompilerError):
    """More open streams of one method than are served."""

    reason = "TOO_MANY_STREAMS"

    def __init__(self, method: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{limit} streams of {method} are open already", retry_after_s=retry_after_s, method=method, limit=limit
        )


class StoreLocked(CompilerError):
    """A store that another compiler serves."""

    reason = "STORE_LOCKED"

    def __init__(self, path: str) -> None:
        super().__init__(f"another compiler serves the store {path}", path=path)


class DatabaseUnavailable(CompilerError):
    """A database that cannot be opened."""

    reason = "DATABASE_UNAVAILABLE"

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(f"database {url} cannot be opened: {detail}", url=url, detail=detail)


class DatabaseSchemaUnsupported(CompilerError):
    """A database whose tables a newer version made."""

    reason = "DATABASE_SCHEMA_UNSUPPORTED"

    def __init__(self, version: int, supported: int) -> None:
        super().__init__(
            f"the database has tables of schema {version}; this version of Kiln knows them up to schema {supported}",
            version=version,
            supported=supported,
        )


def _summarize(what: str, violations: tuple[FieldViolation, ...]) -> str:
    summary = "; ".join(map(str, violations[:_MAX_SUMMARIZED]))
    more = len(violations) - _MAX_SUMMARIZED
    return f"{what}: {summary}" + (f"; and {more} more" if more > 0 else "")
