"""`python -m edge.access.issuer DIRECTORY`: signs a token with the key of a directory, which it makes if it is missing.

For homes, containers and small networks, which have no identity provider. DIRECTORY/jwks.json is for `--auth-jwks`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import OKPAlgorithm

from bundle.host.file_modes import make_private_directory
from edge.access.errors import SigningKeyInvalid
from edge.access.principal import Scope

ALGORITHM: Final = "EdDSA"
KEY_NAME: Final = "key.pem"
JWKS_NAME: Final = "jwks.json"

_DAY_S: Final = 86400
_PRIVATE: Final = 0o600
_PUBLIC: Final = 0o644


class Issuer:
    """A directory with an Ed25519 key and its public part.

    All who may read the key can make tokens. If it is removed, the next issuer makes another one, and servers refuse
    every token of the old one.
    """

    def __init__(self, directory: Path, jwks_path: Path | None = None) -> None:
        """Opens or makes the directory and the key, and writes the public keys; beside the key without `jwks_path`."""
        make_private_directory(directory)
        self._key = _open_key(directory / KEY_NAME)
        jwk = OKPAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        self._key_id = _name_key(jwk)
        public = {**jwk, "kid": self._key_id, "alg": ALGORITHM, "use": "sig"}
        replace_file(jwks_path or directory / JWKS_NAME, json.dumps({"keys": [public]}).encode(), _PUBLIC)

    def sign(self, claims: dict[str, Any]) -> str:
        """Returns the token of these claims."""
        return jwt.encode(claims, self._key, algorithm=ALGORITHM, headers={"kid": self._key_id})


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Writes a file that readers see as it was or as it is now."""
    new = _write_new(path, data, mode)
    new.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, writes or prints the token, and returns the exit code."""
    options = _build_parser().parse_args(arguments)
    expires_at = int(time.time() + options.lifetime)
    claims = {
        "sub": options.subject,
        "aud": options.audience,
        "exp": expires_at,
        "scope": " ".join(options.scope),
        "kiln_deployments": options.deployment,
        "kiln_aliases": options.alias,
        "kiln_bundles": options.bundle,
    }
    claims = {name: value for name, value in claims.items() if value is not None}
    try:
        token = Issuer(options.directory, options.jwks).sign(claims)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(options.out, token.encode() + b"\n", _PRIVATE)
        if options.api_key is not None:
            _write_once(options.api_key, secrets.token_urlsafe().encode() + b"\n")
    except (SigningKeyInvalid, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.out is None:
        sys.stdout.write(f"{token}\n")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m edge.access.issuer",
        description=f"Signs a token with DIRECTORY/{KEY_NAME}, which is made if it is missing, and writes its public "
        "part, a JSON Web Key Set for servers' --auth-jwks.",
    )
    scopes = [scope.value for scope in Scope]
    parser.add_argument("directory", metavar="DIRECTORY", type=Path)
    parser.add_argument("--subject", required=True, metavar="NAME", help="principal, as the audit log calls it")
    parser.add_argument(
        "--scope", required=True, action="append", choices=scopes, help="what it may do; may be repeated"
    )
    parser.add_argument(
        "--deployment", action="append", metavar="PATTERN", help="deployments that it may use; default: all"
    )
    parser.add_argument("--alias", action="append", metavar="PATTERN", help="aliases that it may move; default: all")
    parser.add_argument(
        "--bundle",
        action="append",
        metavar="PATTERN",
        help="bundle names that it may publish, delete and read; default: to publish, its own and new ones, else all",
    )
    parser.add_argument("--audience", default="kiln", metavar="NAME", help="as servers' --auth-audience; default: kiln")
    parser.add_argument(
        "--lifetime", type=int, default=30 * _DAY_S, metavar="SECONDS", help="until it expires; default: 30 days"
    )
    parser.add_argument(
        "--jwks", type=Path, metavar="FILE", help=f"file of the public key; default: DIRECTORY/{JWKS_NAME}"
    )
    parser.add_argument(
        "--api-key", type=Path, metavar="FILE", help="file of a random key for a gateway, made unless it is there"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of the token; default: standard output")
    return parser


def _open_key(path: Path) -> Ed25519PrivateKey:
    with suppress(FileNotFoundError):
        return _read_key(path)
    made = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_once(path, made)
    return _read_key(path)


def _write_once(path: Path, data: bytes) -> None:
    new = _write_new(path, data, _PRIVATE)
    # Unlike a rename, leaves a key alone that another process has made meanwhile.
    with suppress(FileExistsError):
        path.hardlink_to(new)
    new.unlink()


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise SigningKeyInvalid(str(path), "it holds no private key without a password, PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyInvalid(str(path), "its key is not of Ed25519")
    return key


def _write_new(path: Path, data: bytes, mode: int) -> Path:
    """Writes a file beside the one that it is to replace, on the disk when this returns."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
    except BaseException:
        new.unlink()
        raise
    return new


def _name_key(jwk: dict[str, Any]) -> str:
    """Returns the thumbprint of a public key (RFC 7638), so that a key has one id wherever it is."""
    members = {name: jwk[name] for name in ("crv", "kty", "x")}
    text = json.dumps(members, sort_keys=True, separators=(",", ":"))
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
