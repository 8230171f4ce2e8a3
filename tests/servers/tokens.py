"""An issuer of JSON Web Tokens for the length of a test."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

ALL_SCOPES: Final = "infer load compile read promote admin"
#: Makes a private key for each algorithm that servers take.
KEY_MAKERS: Final[dict[str, Any]] = {
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "RS256": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
}


class SigningKey:
    """A private key with its id.

    Attributes:
        jwk: The public part, as an entry of a JWKS.
    """

    def __init__(self, key_id: str = "first", algorithm: str = "EdDSA", private: Any = None) -> None:
        self.key_id = key_id
        self.algorithm = algorithm
        self.private = private or KEY_MAKERS[algorithm]()
        public: Any = get_default_algorithms()[algorithm]
        self.jwk: dict[str, Any] = {
            **public.to_jwk(self.private.public_key(), as_dict=True),
            "kid": key_id,
            "alg": algorithm,
            "use": "sig",
        }
        self.jwk.pop("key_ops", None)

    def sign(self, claims: dict[str, Any], **headers: Any) -> str:
        """A token of exactly these claims; a header of None is left out."""
        merged = {"kid": self.key_id, **headers}
        kept = {name: value for name, value in merged.items() if value is not None}
        return jwt.encode(claims, self.private, algorithm=self.algorithm, headers=kept)

    def public_pem(self) -> bytes:
        """The public key as anyone may have it."""
        pem: bytes = self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return pem


def make_claims(scope: str = ALL_SCOPES, *, lifetime_s: float = 600, **claims: Any) -> dict[str, Any]:
    """Claims that a server with default options takes; a claim of None is left out."""
    merged = {"sub": "alice", "aud": "kiln", "exp": int(time.time() + lifetime_s), "scope": scope, **claims}
    return {name: value for name, value in merged.items() if value is not None}


def write_jwks(path: Path, keys: Sequence[SigningKey]) -> Path:
    """Writes the public keys for `--auth-jwks`."""
    path.write_text(json.dumps({"keys": [key.jwk for key in keys]}))
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"),)


def encode_unsigned(claims: dict[str, Any], key_id: str = "first") -> str:
    """A token of the algorithm `none`."""
    return f"{_encode({'alg': 'none', 'kid': key_id})}.{_encode(claims)}."


def encode_hs256(claims: dict[str, Any], secret: bytes, key_id: str = "first") -> str:
    """A token that is signed with a shared secret: by an attacker, with a public key in its place."""
    signed = f"{_encode({'alg': 'HS256', 'kid': key_id})}.{_encode(claims)}"
    return f"{signed}.{_to_base64(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def _encode(part: dict[str, Any]) -> str:
    return _to_base64(json.dumps(part).encode())


def _to_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
