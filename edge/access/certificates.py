"""Principals by their TLS certificates, which gRPC has verified, and certificates that are revoked."""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import yaml

from edge.access.changing_file import ChangingFile
from edge.access.errors import CertificateRevoked, IdentitiesInvalid
from edge.access.principal import Principal, Scope

#: Kind of a name in a certificate → where gRPC's core puts names of this kind. The first kind that fits counts.
NAME_KINDS: Final[Mapping[str, str]] = {
    "uri": "peer_uri",
    "common_name": "x509_common_name",
    "dns": "peer_dns",
}
_CERTIFICATE: Final = "x509_pem_cert"
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")

#: What gRPC knows of the other end of a connection.
AuthContext = Mapping[str, Iterable[bytes]]


class _Identity(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the file: exactly one name, and what its bearer may do."""

    scopes: list[Scope]
    uri: str | None = None
    dns: str | None = None
    common_name: str | None = None
    deployments: list[str] | None = None
    aliases: list[str] | None = None
    bundles: list[str] | None = None


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    identities: list[_Identity] | None = None
    denied_fingerprints: list[str] = []


@dataclass(frozen=True)
class Identities:
    """What the file of identities says: principals by kind of name and name; None if the file has no list of them.

    `denied_fingerprints` are the SHA-256 of revoked certificates (DER), 64 lower-case hexadecimal digits.
    """

    principals: Mapping[tuple[str, str], Principal] | None = None
    denied_fingerprints: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Reads YAML or JSON."""
        try:
            content = yaml.load(data, Loader=_LOADER)
            document = msgspec.convert({} if content is None else content, _Document)
        except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
            raise ValueError(" ".join(str(error).split())) from error
        denied = frozenset(text.replace(":", "").lower() for text in document.denied_fingerprints)
        for fingerprint in denied:
            if _FINGERPRINT.fullmatch(fingerprint) is None:
                raise ValueError(f"denied_fingerprints: got {fingerprint!r}; accepted: SHA-256, 64 hexadecimal digits")
        if document.identities is None:
            return cls(None, denied)
        principals: dict[tuple[str, str], Principal] = {}
        for place, identity in enumerate(document.identities):
            names = [(kind, name) for kind in NAME_KINDS if (name := getattr(identity, kind))]
            if len(names) != 1:
                raise ValueError(
                    f"identities[{place}]: got {len(names)} names; accepted: one of {', '.join(NAME_KINDS)}"
                )
            if names[0] in principals:
                raise ValueError(f"identities[{place}]: {names[0][1]!r} has an entry already")
            principals[names[0]] = Principal(
                ":".join(names[0]),
                frozenset(identity.scopes),
                deployments=_freeze(identity.deployments),
                aliases=_freeze(identity.aliases),
                bundles=_freeze(identity.bundles),
            )
        return cls(principals, denied)


class CertificateIdentifier:
    """Finds the principal of a connection by the client's certificate."""

    def __init__(self, path: Path | None, *, accepts_all: bool) -> None:
        """Reads nothing yet; `path` is the file of identities, which may change, or None if there is none.

        With `accepts_all`, every certificate that the client CA vouches for has every scope, unless a file lists some.
        """
        self._file = None if path is None else ChangingFile(path, Identities.parse, IdentitiesInvalid)
        self._accepts_all = accepts_all

    async def start(self) -> None:
        """Reads the file."""
        await self._read()

    async def identify(self, connection: AuthContext) -> Principal | None:
        """Returns the principal; None if the connection has no certificate, or one of no principal."""
        certificate = next(iter(connection.get(_CERTIFICATE, ())), None)
        if certificate is None:
            return None
        identities = await self._read()
        fingerprint = _fingerprint(certificate)
        if fingerprint in identities.denied_fingerprints:
            raise CertificateRevoked(fingerprint)
        names = [
            (kind, name.decode("utf-8", "replace"))
            for kind, key in NAME_KINDS.items()
            for name in connection.get(key, ())
        ]
        if identities.principals is not None:
            return next((identities.principals[name] for name in names if name in identities.principals), None)
        if not self._accepts_all:
            return None
        name = ":".join(names[0]) if names else f"sha256:{fingerprint}"
        return Principal(name, frozenset(Scope))

    async def _read(self) -> Identities:
        return Identities() if self._file is None else await self._file.read()


#: The quick parser where libyaml is there.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _freeze(patterns: list[str] | None) -> tuple[str, ...] | None:
    return None if patterns is None else tuple(patterns)


@lru_cache(maxsize=1024)
def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))).hexdigest()
