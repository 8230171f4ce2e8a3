"""Errors of authentication, and of what a principal may do.

A starting server raises those without a code, or an issuer of tokens; clients never see them.
"""

from __future__ import annotations

from collections.abc import Iterable

from bundle.errors import FieldViolation
from edge.errors import EdgeError


class AccessError(EdgeError):
    """Root of the errors of authentication and authorization."""


class AnonymousRefused(AccessError):
    """An address that others can reach, without anything that tells clients apart."""

    message = "no authentication beyond this host: {violation}"
    violation = FieldViolation(
        "address", "{address!r}", "a loopback address, --auth-jwks, --tls-client-ca, or --allow-anonymous"
    )
    address: str


class KeySetInvalid(AccessError, reason="JWKS_INVALID"):
    """Public keys that cannot be read."""

    message = "JWKS {place}: {detail}"
    place: str
    detail: str


class IdentitiesInvalid(AccessError):
    """A file of certificates' identities that cannot be read."""

    message = "identities {place}: {detail}"
    place: str
    detail: str


class SigningKeyInvalid(AccessError):
    """A private key that tokens cannot be signed with."""

    message = "key {path}: {detail}"
    path: str
    detail: str


class KeysUnavailable(AccessError, code="UNAVAILABLE"):
    """No public keys yet: their URL has not answered since the server started."""

    message = "the server has no keys to verify tokens with yet"
    retry_after_s: float


class PrincipalBusy(AccessError, code="RESOURCE_EXHAUSTED"):
    """A principal that has as many streams or builds at once as it may."""

    message = "{principal!r} has {limit} {what} at once, which is its limit"
    principal: str
    what: str
    limit: int
    retry_after_s: float


class Unauthenticated(AccessError, code="UNAUTHENTICATED"):
    """Root of what keeps a server from knowing the principal of a call."""


class TokenMissing(Unauthenticated):
    """A call without a token or a certificate that names a principal."""

    message = "the call names no principal; accepted: {accepted}"
    accepted: str


class TokenInvalid(Unauthenticated):
    """A token that this server does not accept."""

    message = "the token is not accepted: {detail}"
    detail: str


class TokenExpired(Unauthenticated):
    """A token whose time is over."""

    message = "the token has expired"


class CertificateRevoked(Unauthenticated):
    """A client's certificate that the server's operator denies."""

    message = "the certificate with SHA-256 {fingerprint} is revoked"
    fingerprint: str


class Forbidden(AccessError, code="PERMISSION_DENIED"):
    """Root of what a known principal may not do."""


class ScopeMissing(Forbidden):
    """A method that none of the principal's scopes covers."""

    def __init__(self, principal: str, scopes: Iterable[str]) -> None:
        needed = " or ".join(sorted(scopes))
        super().__init__(f"{principal!r} lacks the scope {needed}", principal=principal, scope=needed)


class DeploymentForbidden(Forbidden):
    """A deployment that the principal may not use."""

    message = "{principal!r} may not use deployment {deployment!r}"
    principal: str
    deployment: str


class AliasForbidden(Forbidden):
    """An alias that the principal may not move."""

    message = "{principal!r} may not move alias {alias!r}"
    principal: str
    alias: str


class BundleForbidden(Forbidden):
    """A bundle name that the principal may not publish, delete or read."""

    def __init__(self, principal: str, bundle: str) -> None:
        named = f"the name {bundle!r}" if bundle else "a request that names no bundle by NAME, NAME:vN or NAME@ALIAS"
        super().__init__(f"no bundle pattern of {principal!r} admits {named}", principal=principal, bundle=bundle)
