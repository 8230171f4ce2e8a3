"""TLS and mutual TLS to the compiler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from kiln.bundle.v1 import bundle_pb2_grpc

from bundle.layout import Layout
from edge.errors import PlaintextRefused, TlsFileInvalid
from runtime_svc.bundles.channel import CompilerEndpoint
from runtime_svc.bundles.grpc_source import GrpcBundleSource
from runtime_svc.errors import BundleSourceUnavailable
from tests.bundles.published import LayoutBundleService, publish
from tests.servers.certificates import CertificateFiles, make_certificate


@pytest.fixture
def server_files(tmp_path: Path) -> CertificateFiles:
    return make_certificate(tmp_path, "compiler")


@pytest.fixture
def client_files(tmp_path: Path) -> CertificateFiles:
    return make_certificate(tmp_path, "runtime")


@pytest.fixture
async def address(tmp_path: Path, server_files: CertificateFiles, client_files: CertificateFiles) -> AsyncIterator[str]:
    """A BundleService that asks for the runtime's certificate."""
    bundles = LayoutBundleService(Layout.create(tmp_path / "store"))
    bundles.names["story"] = publish(bundles.layout)
    server = grpc.aio.server()
    bundle_pb2_grpc.add_BundleServiceServicer_to_server(bundles, server)
    credentials = grpc.ssl_server_credentials(
        [(server_files.key.read_bytes(), server_files.certificate.read_bytes())],
        root_certificates=client_files.certificate.read_bytes(),
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def resolve(endpoint: CompilerEndpoint) -> str:
    source = GrpcBundleSource(endpoint)
    try:
        return (await source.resolve("story")).digest
    finally:
        await source.close()


async def test_both_sides_show_certificates(
    address: str, server_files: CertificateFiles, client_files: CertificateFiles
) -> None:
    endpoint = CompilerEndpoint(address, server_files.certificate, client_files.certificate, client_files.key)
    assert (await resolve(endpoint)).startswith("sha256:")


async def test_strangers_are_refused(
    address: str, server_files: CertificateFiles, client_files: CertificateFiles
) -> None:
    for endpoint in (
        CompilerEndpoint(address),
        CompilerEndpoint(address, server_files.certificate),
        CompilerEndpoint(address, client_files.certificate, client_files.certificate, client_files.key),
    ):
        with pytest.raises(BundleSourceUnavailable):
            await resolve(endpoint)


async def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_bytes(b"")
    for name in ("missing.pem", "empty.pem"):
        with pytest.raises(TlsFileInvalid, match=name):
            CompilerEndpoint("127.0.0.1:1", tmp_path / name).connect()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/kiln.sock"])
def test_plaintext_on_loopback(address: str) -> None:
    CompilerEndpoint(address)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "compiler:1", "[2001:db8::1]:1"])
def test_plaintext_elsewhere_is_refused(address: str) -> None:
    with pytest.raises(PlaintextRefused):
        CompilerEndpoint(address)
    CompilerEndpoint(address, allow_insecure=True)
