"""Verifies JSON Web Tokens (RFC 7519) and reads from them who calls."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any, Final

import jwt
from jwt import exceptions

from edge.access.errors import TokenExpired, TokenInvalid
from edge.access.key_set import ALGORITHMS, KeySet
from edge.access.key_source import KeySource
from edge.access.principal import MAX_NAME_CHARACTERS, Principal, Scope

#: Verified tokens that are remembered.
MAX_CACHED: Final = 4096

_REQUIRED: Final = ("sub", "exp", "aud")
_SCOPES: Final[Mapping[str, Scope]] = {scope.value: scope for scope in Scope}
#: What is wrong with a token, by what the library raises; the first that fits counts.
_DETAILS: Final[Mapping[type[Exception], str]] = {
    exceptions.InvalidSignatureError: "its signature is not of the key that it names",
    exceptions.ImmatureSignatureError: "its time has not come yet",
    exceptions.InvalidAudienceError: "it is for another audience",
    exceptions.InvalidIssuerError: "another issuer made it",
    exceptions.InvalidTokenError: "it is no well-formed JWT",
}


class TokenVerifier:
    """Verifies tokens, and remembers those that are valid until they expire or the keys change."""

    def __init__(self, keys: KeySource, *, audience: str, issuer: str | None, clock_skew_s: float) -> None:
        """Takes what tokens must fit: their `iss` must be `issuer`, and None takes any whose key is known.

        The issuer's clock may differ from this host's by `clock_skew_s`.
        """
        self._source = keys
        self._audience = audience
        self._issuer = issuer
        self._clock_skew_s = clock_skew_s
        # By digest, so that no token is kept; each with the time, in seconds since 1970, at which it expires.
        self._verified: dict[bytes, tuple[float, Principal]] = {}
        self._keys: KeySet | None = None

    async def verify(self, token: str) -> Principal:
        """Returns who the token stands for."""
        keys = await self._source.get()
        if keys is not self._keys:
            # A token must not outlive its key.
            self._verified.clear()
            self._keys = keys
        digest = hashlib.sha256(token.encode()).digest()
        cached = self._verified.get(digest)
        if cached is not None and time.time() < cached[0]:
            return cached[1]
        claims = await self._read_claims(token)
        principal = _read_principal(claims)
        if len(self._verified) >= MAX_CACHED:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = (int(claims["exp"]) + self._clock_skew_s, principal)
        return principal

    async def _read_claims(self, token: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
                raise TokenInvalid(f"its algorithm is none of {', '.join(ALGORITHMS)}")
            key = (await self._source.get()).find(key_id, algorithm)
            if key is None:
                key = (await self._source.refresh()).find(key_id, algorithm)
            if key is None:
                raise TokenInvalid("the server has no key of its `kid` and `alg`")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=self._clock_skew_s,
                options={"require": list(_REQUIRED)},
            )
        except exceptions.ExpiredSignatureError as error:
            raise TokenExpired from error
        except exceptions.MissingRequiredClaimError as error:
            raise TokenInvalid(f"it has no claim `{error.claim}`") from error
        except exceptions.PyJWTError as error:
            detail = next((text for kind, text in _DETAILS.items() if isinstance(error, kind)), "it cannot be verified")
            raise TokenInvalid(detail) from error
        return claims


def _read_principal(claims: Mapping[str, Any]) -> Principal:
    name = claims["sub"]
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise TokenInvalid(f"its claim `sub` has not 1 to {MAX_NAME_CHARACTERS} characters")
    words = claims.get("scope", "")
    if not isinstance(words, str):
        raise TokenInvalid("its claim `scope` is no text of words")
    return Principal(
        name,
        # The words of other services are theirs.
        frozenset(_SCOPES[word] for word in words.split() if word in _SCOPES),
        deployments=_read_patterns(claims, "kiln_deployments"),
        aliases=_read_patterns(claims, "kiln_aliases"),
        bundles=_read_patterns(claims, "kiln_bundles"),
    )


def _read_patterns(claims: Mapping[str, Any], claim: str) -> tuple[str, ...] | None:
    patterns = claims.get(claim)
    if patterns is None and claim not in claims:
        return None
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TokenInvalid(f"its claim `{claim}` is no list of patterns")
    return tuple(patterns)
