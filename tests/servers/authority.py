"""A certificate authority for the length of a test."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """A certificate authority.

    Attributes:
        path: PEM file of its own certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        self.path = self._write("ca", self._certificate(self._name, self._key, is_ca=True), self._key)[0]

    def issue(self, name: str, *uris: str) -> tuple[Path, Path]:
        """Writes NAME.pem and NAME-key.pem, valid for NAME, for this host and for `uris`; gives their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        return self._write(name, self._certificate(subject, key, is_ca=False, uris=uris), key)

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_ca: bool, uris: Sequence[str] = ()
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        (common_name,) = subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        hosts = ("localhost", str(common_name.value))
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names += [*map(x509.DNSName, hosts), *map(x509.UniformResourceIdentifier, uris)]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
        certificate_path, key_path = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate_path, key_path
