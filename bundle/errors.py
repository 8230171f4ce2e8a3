"""Errors that a caller can meet, and the bundle format's own.

KilnError                     root of every error that crosses a service boundary
├── ResourcesShort            a host without room, descriptors or memory for what a call needs
└── BundleError
    ├── DigestInvalid         text that is no sha256 digest
    ├── BlobNotFound          a digest that the store does not hold
    ├── BlobMissing           a blob of a bundle that the store has lost
    ├── BlobCorrupt           bytes that do not have the digest they are stored under
    ├── BundleNotFound        a manifest digest or reference that names nothing
    ├── ManifestInvalid       a manifest that does not follow the schema
    ├── AbiUnsupported        a manifest of an ABI, flags or submodels that this code does not know
    ├── NeffInvalid           a NEFF that is cut off, or was made for other cores than its bundle
    ├── LayoutInvalid         a directory that is no OCI image layout, or a broken index
    └── RefInvalid            text that is no bundle reference
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


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


class KilnError(Exception):
    """Root of all named errors.

    Attributes:
        reason: UPPER_SNAKE identifier, part of the API.
        metadata: Every variable of the message, as text.
        violations: Mistakes in the caller's input; empty if the input is not at fault.
        retry_after_s: Seconds after which to try again; None if trying again is useless.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}
        self.violations = violations
        self.retry_after_s = retry_after_s

    @property
    def log_message(self) -> str:
        """The message for logs: an ellipsis stands for each piece of a prompt."""
        text = str(self)
        for violation in self.violations:
            if violation.quotes_text:
                text = text.replace(violation.value, "…")
        return text


class ResourcesShort(KilnError):
    """A host without room, descriptors or memory for what a call needs."""

    reason = "RESOURCES_SHORT"

    def __init__(self, resource: str, detail: str, retry_after_s: float) -> None:
        super().__init__(
            f"the host is short of {resource}: {detail}", retry_after_s=retry_after_s, resource=resource, detail=detail
        )


class BundleError(KilnError):
    """Root of the bundle format's errors."""

    reason = "BUNDLE_INVALID"


class DigestInvalid(BundleError):
    """Text that is no sha256 digest."""

    reason = "DIGEST_INVALID"

    def __init__(self, text: str) -> None:
        violation = FieldViolation("digest", repr(text), "sha256: followed by 64 lower-case hexadecimal digits")
        super().__init__(str(violation), violations=(violation,), digest=text)


class BlobNotFound(BundleError):
    """A digest that the store does not hold."""

    reason = "BLOB_NOT_FOUND"

    def __init__(self, digest: str, place: str = "in the store") -> None:
        super().__init__(f"blob {digest} is not {place}", digest=digest)


class BlobMissing(BundleError):
    """A blob of a bundle that the store has lost."""

    reason = "BLOB_MISSING"

    def __init__(self, digest: str, bundle: str) -> None:
        super().__init__(
            f"bundle {bundle} has lost blob {digest}: the store holds no regular file of it",
            digest=digest,
            bundle=bundle,
        )


class BlobCorrupt(BundleError):
    """Bytes that do not have the digest they are stored under."""

    reason = "BLOB_CORRUPT"

    def __init__(self, digest: str, actual: str, title: str = "") -> None:
        name = f"{title} ({digest})" if title else digest
        super().__init__(f"blob {name} is corrupt: its bytes are {actual}", digest=digest, actual=actual, title=title)


class BundleNotFound(BundleError):
    """A manifest digest or reference that names nothing."""

    reason = "BUNDLE_NOT_FOUND"

    def __init__(self, ref: str, detail: str = "") -> None:
        subject = f"no bundle {ref!r}" if ref else "no bundle"
        super().__init__(f"{subject}: {detail}" if detail else subject, ref=ref)


class ManifestInvalid(BundleError):
    """A manifest that does not follow the schema."""

    reason = "MANIFEST_INVALID"

    def __init__(self, detail: str, digest: str = "") -> None:
        super().__init__(f"manifest {digest or 'of the bundle'} is invalid: {detail}", detail=detail, digest=digest)


class AbiUnsupported(BundleError):
    """A manifest of an ABI version, or with required features, flags or submodels, that this code does not know."""

    reason = "ABI_UNSUPPORTED"

    def __init__(self, field: str, value: str, accepted: str) -> None:
        violation = FieldViolation(field, value, accepted)
        super().__init__(f"unsupported bundle: {violation}", violations=(violation,), field=field, value=value)


class NeffInvalid(BundleError):
    """A NEFF that is cut off, or was made for other cores than its bundle; `violations` names the field."""

    reason = "NEFF_INVALID"

    def __init__(self, tag: str, field: str, value: str, accepted: str) -> None:
        violation = FieldViolation(f"executables[{tag}]: {field}", value, accepted)
        super().__init__(f"this is no NEFF of the bundle: {violation}", violations=(violation,), tag=tag, field=field)


class LayoutInvalid(BundleError):
    """A directory that is no OCI image layout, or a broken index."""

    reason = "LAYOUT_INVALID"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path} is no OCI image layout: {detail}", path=path, detail=detail)


class RefInvalid(BundleError):
    """Text that is no bundle reference, or no bundle name or alias."""

    reason = "REF_INVALID"

    def __init__(self, text: str, accepted: str, field: str = "ref") -> None:
        violation = FieldViolation(field, repr(text), accepted)
        super().__init__(str(violation), violations=(violation,), field=field, ref=text)
