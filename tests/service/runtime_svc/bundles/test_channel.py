"""TLS, mutual TLS and tokens to the compiler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from kiln.bundle.v1 import bundle_pb2_grpc

from bundle.store.layout import Layout
from compiler_svc.api.access_rules import RULES
from edge.access import changing_file
from edge.access.config import AccessConfig
from edge.config import EdgeConfig
from edge.errors import PlaintextRefused, TlsFileInvalid
from edge.server import EdgeServer
from runtime_svc.bundles.errors import BundleSourceRefused, CompilerTokenInvalid
from runtime_svc.bundles.grpc_source import CompilerEndpoint, GrpcBundleSource
from runtime_svc.bundles.leases import LEASE_S
from runtime_svc.errors import BundleSourceUnavailable
from tests.bundles.published import LayoutBundleService, publish
from tests.servers.certificates import make_certificate
from tests.servers.proxy import running_proxy, set_proxies
from tests.servers.runtime import serve_bundles
from tests.servers.tokens import SigningKey, make_claims, write_jwks


@pytest.fixture
def bundles(tmp_path: Path) -> LayoutBundleService:
    bundles = LayoutBundleService(Layout.create(tmp_path / "store"))
    bundles.names["story"] = publish(bundles.layout)
    return bundles


async def resolve(endpoint: CompilerEndpoint) -> str:
    source = GrpcBundleSource(endpoint)
    try:
        return (await source.resolve("story")).digest
    finally:
        await source.close()


async def test_both_sides_show_certificates_and_refuse_strangers(bundles: LayoutBundleService, tmp_path: Path) -> None:
    ours, theirs = make_certificate(tmp_path, "compiler"), make_certificate(tmp_path, "runtime")
    pair = (ours.key.read_bytes(), ours.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], theirs.certificate.read_bytes(), require_client_auth=True)
    async with serve_bundles(bundles, credentials) as address:
        endpoint = CompilerEndpoint(address, ours.certificate, theirs.certificate, theirs.key)
        assert (await resolve(endpoint)).startswith("sha256:")
        for stranger in (
            CompilerEndpoint(address),
            CompilerEndpoint(address, ours.certificate),
            CompilerEndpoint(address, theirs.certificate, theirs.certificate, theirs.key),
        ):
            with pytest.raises(BundleSourceUnavailable):
                await resolve(stranger)


async def test_no_proxy_hears_of_a_compiler_on_this_host(
    bundles: LayoutBundleService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_certificate(tmp_path, "compiler")
    credentials = grpc.ssl_server_credentials([(own.key.read_bytes(), own.certificate.read_bytes())])
    with running_proxy() as proxy:
        set_proxies(monkeypatch, proxy.url)
        async with serve_bundles(bundles) as plain, serve_bundles(bundles, credentials) as secured:
            assert (await resolve(CompilerEndpoint(plain))).startswith("sha256:")
            assert (await resolve(CompilerEndpoint(secured, own.certificate))).startswith("sha256:")
        assert proxy.heard == []
        with pytest.raises(BundleSourceUnavailable):
            await resolve(CompilerEndpoint("compiler.invalid:1", own.certificate))
        assert proxy.heard[0] == "CONNECT compiler.invalid:1 HTTP/1.1"


async def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_bytes(b"")
    for name in ("missing.pem", "empty.pem"):
        with pytest.raises(TlsFileInvalid, match=name):
            CompilerEndpoint("127.0.0.1:1", tmp_path / name).connect()


def test_plaintext_stays_on_loopback() -> None:
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/kiln.sock"):
        CompilerEndpoint(address)
    for address in ("10.0.0.1:1", "compiler:1", "[2001:db8::1]:1"):
        CompilerEndpoint(address, allow_insecure=True)
        with pytest.raises(PlaintextRefused):
            CompilerEndpoint(address)


KEY = SigningKey()


@pytest.fixture
async def asking(bundles: LayoutBundleService, tmp_path: Path) -> AsyncIterator[str]:
    """A BundleService that asks its clients for a token, as the compiler does."""
    jwks = str(write_jwks(tmp_path / "jwks.json", [KEY]))
    server = EdgeServer(
        EdgeConfig("127.0.0.1:0", drain_timeout_s=0.1, access=AccessConfig(jwks=jwks, is_required=True)),
        services=("kiln.bundle.v1.BundleService",),
        register=lambda grpc_server: bundle_pb2_grpc.add_BundleServiceServicer_to_server(bundles, grpc_server),
        rules=RULES,
    )
    yield f"127.0.0.1:{await server.start()}"
    await server.drain()


async def test_every_call_shows_the_token(asking: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(KEY.sign(make_claims("load")) + "\n")
    source = GrpcBundleSource(CompilerEndpoint(asking, token_path=path))
    try:
        bundle = await source.resolve("story")
        await source.lease(bundle.digest, "runtime/1", LEASE_S)
        await source.release(bundle.digest, "runtime/1")
        size_bytes = sum([len(piece) async for piece in source.read_blob(bundle.blobs[0].digest)])
    finally:
        await source.close()
    assert size_bytes == bundle.blobs[0].size_bytes


async def test_a_renewed_token_is_shown(asking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing_file, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "token"
    path.write_text(KEY.sign(make_claims("load", lifetime_s=-600)))
    source = GrpcBundleSource(CompilerEndpoint(asking, token_path=path))
    try:
        with pytest.raises(BundleSourceRefused, match="expired"):
            await source.resolve("story")
        path.write_text(KEY.sign(make_claims("load")))
        assert (await source.resolve("story")).digest
        path.write_text(KEY.sign(make_claims("infer")))
        with pytest.raises(BundleSourceRefused, match="lacks the scope load"):
            await source.lease("sha256:" + "ab" * 32, "runtime/1", 60)
    finally:
        await source.close()


async def test_a_runtime_without_a_token_is_refused(asking: str, tmp_path: Path) -> None:
    with pytest.raises(BundleSourceRefused, match="names no principal"):
        await resolve(CompilerEndpoint(asking))
    for data, detail in ((None, "No such file"), (b"two words", "it holds no JWT")):
        path = tmp_path / "token"
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(CompilerTokenInvalid, match=detail) as caught:
            await resolve(CompilerEndpoint(asking, token_path=path))
        assert "words" not in str(caught.value)
