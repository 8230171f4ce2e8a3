"""The public keys that tokens are verified with: a JSON Web Key Set (RFC 7517)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from jwt import PyJWK
from jwt.exceptions import PyJWTError

#: Algorithm of a signature → type and curve of its keys. A key has one algorithm, whatever a token says.
ALGORITHMS: Final[Mapping[str, tuple[str, str | None]]] = {
    "EdDSA": ("OKP", "Ed25519"),
    "ES256": ("EC", "P-256"),
    "RS256": ("RSA", None),
}
_ALGORITHM_OF: Final = {kind: algorithm for algorithm, kind in ALGORITHMS.items()}

MAX_KEYS: Final = 256
MIN_RSA_BITS: Final = 2048


@dataclass(frozen=True)
class KeySet:
    """Public keys by id and algorithm; the id is None for a key without one."""

    keys: Mapping[tuple[str | None, str], PyJWK]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Reads a JWKS. Keys for other purposes or of other algorithms are left out, as RFC 7517 asks."""
        try:
            listed = json.loads(data)["keys"]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise ValueError("it is no JSON object with a list `keys`") from error
        if not isinstance(listed, list) or len(listed) > MAX_KEYS:
            raise ValueError(f"`keys` is no list of at most {MAX_KEYS} keys")
        keys = {}
        for place, jwk in enumerate(listed):
            try:
                key = _parse_key(jwk)
            except (ValueError, TypeError, PyJWTError) as error:
                # PyJWT's messages repeat the key.
                detail = str(error) if type(error) is ValueError else "it is malformed"
                raise ValueError(f"keys[{place}]: {detail}") from error
            if key is not None:
                keys[key.key_id, key.algorithm_name] = key
        if not keys:
            raise ValueError(f"it has no key for signatures by {', '.join(ALGORITHMS)}")
        return cls(keys)

    def find(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """Returns the key of a token's `kid`, or without one the only key of the algorithm; None if there is none."""
        if key_id is not None:
            return self.keys.get((key_id, algorithm))
        fitting = [key for (_, fits), key in self.keys.items() if fits == algorithm]
        return fitting[0] if len(fitting) == 1 else None


def _parse_key(jwk: Any) -> PyJWK | None:
    if not isinstance(jwk, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - what its caller catches
    if "d" in jwk or jwk.get("kty") == "oct":
        raise ValueError("it is secret; a JWKS holds public keys only")
    algorithm = _ALGORITHM_OF.get((str(jwk.get("kty")), jwk.get("crv")))
    if algorithm is None or jwk.get("alg", algorithm) != algorithm or jwk.get("use", "sig") != "sig":
        return None
    if not isinstance(jwk.get("kid", ""), str):
        raise ValueError("its `kid` is no text")  # noqa: TRY004
    key = PyJWK(jwk, algorithm)
    if algorithm == "RS256" and key.key.key_size < MIN_RSA_BITS:
        raise ValueError(f"it has {key.key.key_size} bits; accepted: at least {MIN_RSA_BITS}")
    return key
