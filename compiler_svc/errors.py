"""Errors of the compiler service."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

from bundle.errors import FieldViolation, KilnError, Unsaid
from bundle.reference import ACCEPTED_ALIAS, ACCEPTED_NAME

# A status travels in HTTP/2 headers, of which peers accept some 8 KiB.
_MAX_VIOLATIONS: Final = 16
_MAX_SUMMARIZED: Final = 4
_MAX_SHORTENED: Final = 300
#: Directories before the name of a file: clients see the names alone.
_DIRECTORIES: Final = re.compile(r"""(?<=')/[^']*/|[^\s'"(\[]*/""")


class CompilerError(KilnError, code="INTERNAL"):
    """Root of the compiler service's errors."""


class ConfigInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """A configuration with mistakes, all of them listed."""

    def __init__(self, violations: Iterable[FieldViolation]) -> None:
        listed = tuple(violations)
        super().__init__(_summarize("invalid configuration", listed), violations=listed[:_MAX_VIOLATIONS])


class FeatureNotServed(CompilerError, code="INVALID_ARGUMENT"):
    """A configuration or target that the API knows but this version does not serve."""

    def __init__(self, violations: Iterable[FieldViolation]) -> None:
        listed = tuple(violations)
        features = ",".join(violation.field for violation in listed)
        super().__init__(_summarize("not served", listed), violations=listed[:_MAX_VIOLATIONS], features=features)


class NameInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """Text that is not a bundle name, or a name whose tags would be ambiguous."""

    violation = FieldViolation("name", "{name!r}", ACCEPTED_NAME)
    name: str


class NameOwned(CompilerError, code="PERMISSION_DENIED"):
    """A bundle name that another principal has, or that a release made which kept no owners."""

    message = "the name is not the caller's: {violation}"
    violation = FieldViolation(
        "name", "{name!r}", "a name of the caller's or a new one, or with the scope admin or a pattern of the token any"
    )
    name: str


class OwnerInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """Text that is no principal's name."""

    def __init__(self, owner: str, limit: int) -> None:
        shown = repr(owner) if len(owner) <= limit else f"{len(owner)} characters"
        violation = FieldViolation("owner", shown, f"at most {limit} printable characters")
        super().__init__(str(violation), violations=(violation,))


class PathOutsideModelRoots(CompilerError, code="PERMISSION_DENIED"):
    """A model path that leaves the configured roots."""

    def __init__(self, path: str, model_roots: Sequence[Path], *, is_link: bool, field: str = "model") -> None:
        detail = " (a link that leads outside of the model roots)" if is_link else ""
        roots = " or ".join(map(str, model_roots))
        accepted = (
            f"a directory below {roots} on the compiler's host, links followed; "
            "--model-root DIR of `kiln up`, or of the compiler, adds a root"
        )
        violation = FieldViolation(field, f"{path!r}{detail}", accepted)
        super().__init__(str(violation), violations=(violation,), path=path)


class OutputExists(CompilerError, code="ALREADY_EXISTS"):
    """A checkpoint to write whose directory exists."""

    violation = FieldViolation("output", "{output}, which exists", "a directory that does not exist yet")
    output: str


class OutputRefused(CompilerError, code="FAILED_PRECONDITION"):
    """A checkpoint to write in a place where the compiler cannot write it."""

    violation = FieldViolation("output", "{output} ({detail})", "{accepted}")
    output: str
    detail: str
    accepted: Unsaid[str]


class RequestIdReused(CompilerError, code="ALREADY_EXISTS"):
    """A request id that belongs to another request."""

    message = "request_id {request_id!r} belongs to {operation}, whose request was another"
    request_id: str
    operation: str


class CompileQueueFull(CompilerError, code="RESOURCE_EXHAUSTED"):
    """More compiles than the queue holds."""

    message = "{queue_size} compiles are waiting already"
    queue_size: int
    retry_after_s: float


class OperationNotFound(CompilerError, code="NOT_FOUND"):
    """A name that no operation has."""

    message = "no operation {operation!r}"
    operation: str


class OperationNotDone(CompilerError, code="FAILED_PRECONDITION"):
    """An operation that is still running, in a request for a finished one."""

    message = "{operation} is not done: cancel it or wait for it first"
    operation: str


class PageTokenInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """A page token that this service did not give out."""

    violation = FieldViolation("page_token", "{page_token!r}", "the next_page_token of the previous page, or empty")
    page_token: str


class FilterInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """A list filter that this service does not know."""

    violation = FieldViolation("filter", "{filter!r}", "empty, done=true or done=false")
    filter: str


class OffsetInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """An offset outside a blob."""

    violation = FieldViolation("offset_bytes", "{offset_bytes}", "0 to {size_bytes}")
    offset_bytes: int
    size_bytes: int


class AliasInvalid(CompilerError, code="INVALID_ARGUMENT"):
    """Text that is not an alias, or an alias whose tag would be ambiguous."""

    violation = FieldViolation("alias", "{alias!r}", ACCEPTED_ALIAS)
    alias: str


class TagAmbiguous(CompilerError, code="INVALID_ARGUMENT"):
    """An alias whose tag in the store's index another alias has."""

    violation = FieldViolation("alias", "{alias!r}", "an alias whose tag is its own: {other} has the tag {tag}")
    alias: str
    tag: str
    other: str


class AliasNotFound(CompilerError, code="NOT_FOUND"):
    """An alias that does not exist."""

    message = "no alias {name}@{alias}"
    name: str
    alias: str


class AliasChanged(CompilerError, code="ABORTED"):
    """An alias that moved since its etag was read."""

    message = "alias {name}@{alias} changed: its etag is {actual!r}, not {etag!r}"
    name: str
    alias: str
    etag: str
    actual: str


class AliasIncompatible(CompilerError, code="FAILED_PRECONDITION"):
    """A version with another graph ABI than the one that an alias names: deployments that follow it cannot take it."""

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


class BundleInUse(CompilerError, code="FAILED_PRECONDITION"):
    """A version that an alias still names."""

    def __init__(self, ref: str, aliases: Iterable[str]) -> None:
        listed = ", ".join(sorted(aliases))
        super().__init__(f"{ref} is named by alias {listed}", ref=ref, aliases=listed)


class CompileCancelled(CompilerError, code="CANCELLED"):
    """A compile that a client cancelled."""

    message = "{operation} was cancelled"
    operation: str


class CompilerRestarted(CompilerError, code="UNAVAILABLE"):
    """A compile that was interrupted too often, or cannot be resumed."""

    message = "the compiler restarted while {operation} ran, and does not resume it: {detail}"
    operation: str
    detail: str


class BuildFailed(CompilerError):
    """A build that met an error without a name, or whose process ended without a result."""

    message = "the build failed: {detail}"
    detail: str

    @classmethod
    def by(cls, error: BaseException, stage: str) -> Self:
        """Names an error without a name."""
        return cls(f"{shorten(error)} ({stage})")


class BuildStalled(CompilerError, code="UNAVAILABLE"):
    """A build process that computed nothing for too long, and was killed."""

    def __init__(self, idle_s: float) -> None:
        super().__init__(f"the build stalled: its process computed nothing for {idle_s:g} s", idle_s=f"{idle_s:g}")


class GraphAbiMismatch(CompilerError, code="FAILED_PRECONDITION"):
    """A checkpoint whose weights the executables of a bundle cannot take."""

    message = "the weights do not fit the bundle's executables: {attribute} is {actual}, theirs is {expected}"
    attribute: str
    actual: object
    expected: object


class ExecutablesMissing(CompilerError, code="FAILED_PRECONDITION"):
    """A bundle without executables, in a request that needs them."""

    violation = FieldViolation(
        "executables_ref", "{ref!r}", "a bundle with executables, not one of weights or adapters only"
    )
    ref: str


class AdaptersUnsupported(CompilerError, code="FAILED_PRECONDITION"):
    """A bundle whose executables have no room for adapters, in a request that needs it."""

    violation = FieldViolation(
        "executables_ref", "{ref!r}", "a bundle that was compiled with neuron_config.lora_config"
    )
    ref: str


class TooManyWatchers(CompilerError, code="RESOURCE_EXHAUSTED"):
    """More watchers of one operation than are served."""

    message = "{limit} calls watch {operation} already"
    operation: str
    limit: int
    retry_after_s: float


class TooManyStreams(CompilerError, code="RESOURCE_EXHAUSTED"):
    """More open streams of one method than are served."""

    message = "{limit} streams of {method} are open already"
    method: str
    limit: int
    retry_after_s: float


class StoreLocked(KilnError):
    """A store that another compiler serves."""

    message = "another compiler serves the store {path}"
    path: str


class DatabaseUnavailable(KilnError):
    """A database that cannot be opened."""

    message = "database {url} cannot be opened: {detail}"
    url: str
    detail: str


class DatabaseSchemaUnsupported(KilnError):
    """A database whose tables a newer version made."""

    message = "the database has tables of schema {version}; this version of Kiln knows them up to schema {supported}"
    version: int
    supported: int


def _summarize(what: str, violations: tuple[FieldViolation, ...]) -> str:
    summary = "; ".join(map(str, violations[:_MAX_SUMMARIZED]))
    more = len(violations) - _MAX_SUMMARIZED
    return f"{what}: {summary}" + (f"; and {more} more" if more > 0 else "")


def shorten(error: BaseException) -> str:
    """Class and message of an error of others or a bug of ours, for callers: without directories, and without what
    compilers say behind the first line.
    """
    try:
        text = str(error)
    except Exception as other:  # noqa: BLE001 - whatever the error's own code raises
        text = f"no text ({type(other).__name__})"
    first = (text.strip().splitlines() or [""])[0].encode(errors="replace").decode()
    return _DIRECTORIES.sub("", f"{type(error).__name__}: {first}").rstrip(": .")[:_MAX_SHORTENED]
