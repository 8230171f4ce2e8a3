"""Errors of authentication, and of what a principal may do.

AccessError
├── AnonymousRefused          an address that others can reach, without anything that tells clients apart
├── KeySetInvalid             public keys that cannot be read
├── IdentitiesInvalid         a file of certificates' identities that cannot be read
├── SigningKeyInvalid         a private key that tokens cannot be signed with
├── KeysUnavailable           no public keys yet, because their URL has not answered
├── PrincipalBusy             a principal that has as many streams or builds as it may
├── Unauthenticated
│   ├── TokenMissing          a call without a token or a certificate that names a principal
│   ├── TokenInvalid          a token that this server does not accept
│   ├── TokenExpired          a token whose time is over
│   └── CertificateRevoked    a certificate that the server's operator denies
└── Forbidden
    ├── ScopeMissing          a method that none of the principal's scopes covers
    ├── DeploymentForbidden   a deployment that the principal may not use
    ├── AliasForbidden        an alias that the principal may not move
    └── BundleForbidden       a bundle name that the principal may not publish, delete or read

A starting server raises the first three, an issuer of tokens the fourth; clients never see them.
"""

from __future__ import annotations

from collections.abc import Iterable

from bundle.errors import FieldViolation
from edge.errors import EdgeError


class AccessError(EdgeError):
    """Root of the errors of authentication and authorization."""

    reason = "ACCESS_ERROR"


class AnonymousRefused(AccessError):
    """An address that others can reach, without anything that tells clients apart."""

    reason = "ANONYMOUS_REFUSED"

    def __init__(self, address: str) -> None:
        accepted = "a loopback address, --auth-jwks, --tls-client-ca, or --allow-anonymous"
        violation = FieldViolation("address", repr(address), accepted)
        super().__init__(f"no authentication beyond this host: {violation}", violations=(violation,), address=address)


class KeySetInvalid(AccessError):
    """Public keys that cannot be read."""

    reason = "JWKS_INVALID"

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(f"JWKS {place}: {detail}", place=place, detail=detail)


class IdentitiesInvalid(AccessError):
    """A file of certificates' identities that cannot be read."""

    reason = "IDENTITIES_INVALID"

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(f"identities {place}: {detail}", place=place, detail=detail)


class SigningKeyInvalid(AccessError):
    """A private key that tokens cannot be signed with."""

    reason = "SIGNING_KEY_INVALID"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"key {path}: {detail}", path=path, detail=detail)


class KeysUnavailable(AccessError):
    """No public keys yet: their URL has not answered since the server started."""

    reason = "KEYS_UNAVAILABLE"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the server has no keys to verify tokens with yet", retry_after_s=retry_after_s)


class PrincipalBusy(AccessError):
    """A principal that has as many streams or builds at once as it may."""

    reason = "PRINCIPAL_BUSY"

    def __init__(self, principal: str, what: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{principal!r} has {limit} {what} at once, which is its limit",
            retry_after_s=retry_after_s,
            principal=principal,
            what=what,
            limit=limit,
        )


class Unauthenticated(AccessError):
    """Root of what keeps a server from knowing the principal of a call."""

    reason = "UNAUTHENTICATED"


class TokenMissing(Unauthenticated):
    """A call without a token or a certificate that names a principal."""

    reason = "TOKEN_MISSING"

    def __init__(self, accepted: str) -> None:
        super().__init__(f"the call names no principal; accepted: {accepted}", accepted=accepted)


class TokenInvalid(Unauthenticated):
    """A token that this server does not accept."""

    reason = "TOKEN_INVALID"

    def __init__(self, detail: str) -> None:
        super().__init__(f"the token is not accepted: {detail}", detail=detail)


class TokenExpired(Unauthenticated):
    """A token whose time is over."""

    reason = "TOKEN_EXPIRED"

    def __init__(self) -> None:
        super().__init__("the token has expired")


class CertificateRevoked(Unauthenticated):
    """A client's certificate that the server's operator denies."""

    reason = "CERTIFICATE_REVOKED"

    def __init__(self, fingerprint: str) -> None:
        super().__init__(f"the certificate with SHA-256 {fingerprint} is revoked", fingerprint=fingerprint)


class Forbidden(AccessError):
    """Root of what a known principal may not do."""

    reason = "FORBIDDEN"


class ScopeMissing(Forbidden):
    """A method that none of the principal's scopes covers."""

    reason = "SCOPE_MISSING"

    def __init__(self, principal: str, scopes: Iterable[str]) -> None:
        needed = " or ".join(sorted(scopes))
        super().__init__(f"{principal!r} lacks the scope {needed}", principal=principal, scope=needed)


class DeploymentForbidden(Forbidden):
    """A deployment that the principal may not use."""

    reason = "DEPLOYMENT_FORBIDDEN"

    def __init__(self, principal: str, deployment: str) -> None:
        super().__init__(
            f"{principal!r} may not use deployment {deployment!r}", principal=principal, deployment=deployment
        )


class AliasForbidden(Forbidden):
    """An alias that the principal may not move."""

    reason = "ALIAS_FORBIDDEN"

    def __init__(self, principal: str, alias: str) -> None:
        super().__init__(f"{principal!r} may not move alias {alias!r}", principal=principal, alias=alias)


class BundleForbidden(Forbidden):
    """A bundle name that the principal may not publish, delete or read."""

    reason = "BUNDLE_FORBIDDEN"

    def __init__(self, principal: str, bundle: str) -> None:
        named = f"the name {bundle!r}" if bundle else "a request that names no bundle by NAME, NAME:vN or NAME@ALIAS"
        super().__init__(f"no bundle pattern of {principal!r} admits {named}", principal=principal, bundle=bundle)
