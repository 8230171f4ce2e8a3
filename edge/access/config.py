"""How a server tells its clients apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """How a server tells its clients apart, and what it asks of them.

    Attributes:
        jwks: Path or https URL of the public keys that tokens are verified with; None verifies no token.
        audience: An audience (`aud`) that tokens must be for.
        issuer: The issuer (`iss`) that tokens must be of; None for any whose key is known.
        clock_skew_s: By how much an issuer's clock may differ.
        identities: File that maps certificates to principals, and denies some; None if there is none.
        is_required: Whether calls without a principal are refused on loopback, too.
        allow_anonymous: Whether they may be served on other addresses.
        max_streams: Streams that one principal may have at once.
    """

    jwks: str | None = None
    audience: str = "kiln"
    issuer: str | None = None
    clock_skew_s: float = 30.0
    identities: Path | None = None
    is_required: bool = False
    allow_anonymous: bool = False
    max_streams: int = 1024
