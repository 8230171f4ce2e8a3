"""Errors that a caller can meet, and the bundle format's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Annotated, ClassVar, Final, Literal, TypeVar, dataclass_transform

#: The codes of gRPC that errors have, by their names there.
Code = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "UNIMPLEMENTED",
    "UNAVAILABLE",
    "DATA_LOSS",
    "INTERNAL",
]

_Value = TypeVar("_Value")
#: A variable of an error that its texts may name, and that its metadata leaves out.
Unsaid = Annotated[_Value, "not in the metadata"]

#: A parameter that callers give by place or by name.
_ANY_WAY: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One mistake in a caller's input.

    Attributes:
        field: Path of the field, such as `neuron_config.seq_len`.
        value: The value given, as text.
        accepted: The values that would be accepted.
        quotes_text: Whether the value repeats a piece of a prompt. The caller is told it; logs are not.
    """

    field: str
    value: str
    accepted: str
    quotes_text: bool = False

    def __str__(self) -> str:
        return f"{self.field}: got {self.value}; accepted: {self.accepted}"


@dataclass_transform(eq_default=False)
class KilnError(Exception):
    """Root of all named errors, each of which a class states as data.

        class QueueFull(RuntimeServiceError, code="RESOURCE_EXHAUSTED"):
            "A queue that holds as many requests as it may."

            message = "{capacity} requests wait already"
            capacity: int
            retry_after_s: float

    A class without a code has that of its base. Its reason is its name, as in `QUEUE_FULL`, unless it gives another.
    Its annotations are the parameters of its constructor. Its texts name these in braces, and commas join the items of
    a sequence. A class whose texts need code has an `__init__`, which calls `KilnError.__init__`.

    Attributes:
        code: gRPC code, unless a service has its own for the class; None if clients are not told the error.
        reason: UPPER_SNAKE identifier, part of the API.
        message: What a person reads; by default, the violation.
        violation: The mistake in the caller's input, if there is one; its texts name variables, too.
        variables: The parameters of the constructor that its annotations make.
        metadata: Every variable that is not `Unsaid`, as text.
        violations: Mistakes in the caller's input; empty if the input is not at fault.
        retry_after_s: Seconds after which to try again; None if trying again is useless.
    """

    code: ClassVar[Code | None] = None
    reason: ClassVar[str] = "INTERNAL"
    message: ClassVar[str] = "{violation}"
    violation: ClassVar[FieldViolation | None] = None
    retry_after_s: float | None = None
    violations: Sequence[FieldViolation] = ()
    variables: ClassVar[inspect.Signature] = inspect.Signature()
    _unsaid: ClassVar[frozenset[str]] = frozenset({"retry_after_s", "violation", "violations"})

    def __init_subclass__(cls, *, code: Code | None = None, reason: str = "") -> None:
        cls.code = code or cls.code
        cls.reason = reason or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).upper()
        own, given = inspect.get_annotations(cls), vars(cls)
        assert all(isinstance(kind, str) for kind in own.values()), f"{cls.__module__} evaluates its annotations"
        cls._unsaid = cls._unsaid | {name for name, kind in own.items() if kind.startswith("Unsaid[")}
        added = {
            name: inspect.Parameter(name, _ANY_WAY, annotation=kind, default=given.get(name, inspect.Parameter.empty))
            for name, kind in own.items()
        }
        cls.variables = inspect.Signature(list({**cls.variables.parameters, **added}.values()))
        if "__init__" not in given and (cls.variables.parameters or given.keys() & {"message", "violation"}):
            cls.__init__ = _take_variables  # type: ignore[method-assign]
            known = {*cls.variables.parameters, *(["violation"] if cls.violation else [])}
            if unknown := {name for text in cls._texts() for _, name, _, _ in Formatter().parse(text) if name} - known:
                raise TypeError(f"texts of {cls.__name__} name {', '.join(sorted(unknown))}, which it does not have")

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        mistake = cls.violation
        return (cls.message, *((mistake.field, mistake.value, mistake.accepted) if mistake else ()))

    def __init__(
        self,
        message: str | None = None,
        *,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        """Takes what an error says, in place of what its class states."""
        super().__init__(self.message if message is None else message)
        self.metadata = {key: str(value) for key, value in metadata.items()}
        self.violations = tuple(violations)
        self.retry_after_s = self.retry_after_s if retry_after_s is None else retry_after_s

    @property
    def log_message(self) -> str:
        """The message for logs: an ellipsis stands for each piece of a prompt."""
        text = str(self)
        for violation in self.violations:
            if violation.quotes_text:
                text = text.replace(violation.value, "…")
        return text


def _take_variables(self: KilnError, *args: object, **kwargs: object) -> None:
    """The constructor of every class that states what it says."""
    bound = self.variables.bind(*args, **kwargs)
    bound.apply_defaults()
    vars(self).update(bound.arguments)
    shown = {name: _show(value) for name, value in bound.arguments.items()}
    violations = self.violations
    if self.violation is not None:
        field, value, accepted = (text.format_map(shown) for text in self._texts()[1:])
        shown["violation"] = violation = replace(self.violation, field=field, value=value, accepted=accepted)
        violations = (violation,)
    metadata = {name: value for name, value in shown.items() if name not in self._unsaid}
    text = self.message.format_map(shown)
    KilnError.__init__(self, text, violations=violations, retry_after_s=self.retry_after_s, **metadata)


def _show(value: object) -> object:
    """A value as texts name it."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        separator = "; " if any(isinstance(one, FieldViolation) for one in value) else ", "
        return separator.join(map(str, value))
    return value


class ResourcesShort(KilnError, code="RESOURCE_EXHAUSTED"):
    """A host without room, descriptors or memory for what a call needs."""

    message = "the host is short of {resource}: {detail}"
    resource: str
    detail: str
    retry_after_s: float


class BundleError(KilnError, code="INTERNAL", reason="BUNDLE_INVALID"):
    """Root of the bundle format's errors."""


class DigestInvalid(BundleError, code="INVALID_ARGUMENT"):
    """Text that is no sha256 digest."""

    violation = FieldViolation("digest", "{digest!r}", "sha256: followed by 64 lower-case hexadecimal digits")
    digest: str


class BlobNotFound(BundleError, code="NOT_FOUND"):
    """A digest that the store does not hold."""

    message = "blob {digest} is not {place}"
    digest: str
    place: Unsaid[str] = "in the store"


class BlobMissing(BundleError, code="DATA_LOSS"):
    """A blob of a bundle that the store has lost."""

    message = "bundle {bundle} has lost blob {digest}: the store holds no regular file of it"
    digest: str
    bundle: str


class BlobCorrupt(BundleError, code="DATA_LOSS"):
    """Bytes that do not have the digest they are stored under."""

    def __init__(self, digest: str, actual: str, title: str = "") -> None:
        name = f"{title} ({digest})" if title else digest
        super().__init__(f"blob {name} is corrupt: its bytes are {actual}", digest=digest, actual=actual, title=title)


class BundleNotFound(BundleError, code="NOT_FOUND"):
    """A manifest digest or reference that names nothing."""

    def __init__(self, ref: str, detail: str = "") -> None:
        subject = f"no bundle {ref!r}" if ref else "no bundle"
        super().__init__(f"{subject}: {detail}" if detail else subject, ref=ref)


class ManifestInvalid(BundleError, code="FAILED_PRECONDITION"):
    """A manifest that does not follow the schema."""

    def __init__(self, detail: str, digest: str = "") -> None:
        super().__init__(f"manifest {digest or 'of the bundle'} is invalid: {detail}", detail=detail, digest=digest)


class AbiUnsupported(BundleError, code="FAILED_PRECONDITION"):
    """A manifest of an ABI version, or with required features, flags or submodels, that this code does not know."""

    message = "unsupported bundle: {violation}"
    violation = FieldViolation("{field}", "{value}", "{accepted}")
    field: str
    value: str
    accepted: Unsaid[str]


class NeffInvalid(BundleError, code="FAILED_PRECONDITION"):
    """A NEFF that is cut off, or was made for other cores than its bundle; `violations` names the field."""

    message = "this is no NEFF of the bundle: {violation}"
    violation = FieldViolation("executables[{tag}]: {field}", "{value}", "{accepted}")
    tag: str
    field: str
    value: Unsaid[str]
    accepted: Unsaid[str]


class LayoutInvalid(BundleError, code="DATA_LOSS"):
    """A directory that is no OCI image layout, or a broken index."""

    message = "{path} is no OCI image layout: {detail}"
    path: str
    detail: str


class RefInvalid(BundleError, code="INVALID_ARGUMENT"):
    """Text that is no bundle reference, or no bundle name or alias."""

    violation = FieldViolation("{field}", "{ref!r}", "{accepted}")
    ref: str
    accepted: Unsaid[str]
    field: str = "ref"
