"""How a server tells its clients apart."""

from __future__ import annotations

from pathlib import Path

from edge.options import COUNT, FLAG, KEY_PLACE, PATH, SECONDS, TEXT, option, option_class


@option_class(slots=True)
class AccessConfig:
    """How a server tells its clients apart, and what it asks of them."""

    jwks: str | None = option(
        KEY_PLACE,
        "public keys (JWKS) that tokens are verified with",
        name="auth-jwks",
        default=None,
        default_text="no tokens",
    )
    audience: str = option(TEXT, "audience (`aud`) that tokens must be for", name="auth-audience", default="kiln")
    issuer: str | None = option(
        TEXT,
        "issuer (`iss`) that tokens must be of",
        name="auth-issuer",
        default=None,
        default_text="any whose key is known",
    )
    clock_skew_s: float = option(SECONDS, "how far an issuer's clock may be off", name="auth-clock-skew", default=30.0)
    identities: Path | None = option(
        PATH,
        "YAML or JSON: what clients' certificates stand for, and which are revoked; needs `tls-client-ca`",
        name="auth-identities",
        default=None,
    )
    is_required: bool = option(
        FLAG, "refuse calls without a principal on loopback, too", name="require-auth", default=False
    )
    allow_anonymous: bool = option(FLAG, "serve calls without a principal beyond loopback", default=False)
    max_streams: int = option(
        COUNT, "streams that one principal may have at once", name="max-streams-per-principal", default=1024
    )
