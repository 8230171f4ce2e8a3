"""Promotion of a bundle from one fleet to the next, through a registry and skopeo."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml
from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.removal import remove_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.newer import NEW_FIELDS, publish_newer
from tests.bundles.samples import publish_sample
from tests.hang_guard import HANG_S
from tests.servers.running_compiler import Client, serve_compiler
from tests.tools import require_tool


@asynccontextmanager
async def run_registry(directory: Path) -> AsyncIterator[str]:
    """Runs Debian's registry with its files in a directory; yields its address."""
    program = require_tool("docker-registry")
    config = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(directory / "registry")}},
        "http": {"addr": "127.0.0.1:0"},
    }
    path, log = directory / "registry.yml", directory / "registry.log"
    path.write_text(yaml.safe_dump(config))
    with log.open("wb") as file:
        registry = await asyncio.create_subprocess_exec(program, "serve", path, stdout=file, stderr=file)
    try:
        async with asyncio.timeout(HANG_S):
            while (listening := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())) is None:
                assert registry.returncode is None, log.read_text()
                await asyncio.sleep(0.02)
        yield listening[1]
    finally:
        registry.kill()
        await registry.wait()


async def copy(source: str, target: str) -> None:
    options = ("--insecure-policy", "copy", "--src-tls-verify=false", "--dest-tls-verify=false")
    copying = await asyncio.create_subprocess_exec(require_tool("skopeo"), *options, source, target)
    assert await asyncio.wait_for(copying.wait(), 60) == 0


async def import_bundle(client: Client, layout: Layout, source_ref: str) -> pb.Bundle:
    request = pb.ImportBundleRequest(layout=str(layout.root), source_ref=source_ref, name="tiny", alias="prod")
    events = [event async for event in client.bundles.ImportBundle(request)]
    return events[-1].result.bundle


async def test_a_manifest_with_unknown_fields_keeps_bytes_and_digest(tmp_path: Path) -> None:
    """Imported, exported by the tag of its alias, pushed, pulled, imported by the next fleet, described to runtimes."""
    made = Layout.create(tmp_path / "made")
    first = publish_sample(made)
    digest = publish_newer(made, first)
    remove_bundle(made, first)
    manifest_json = open_bundle(made, digest).manifest_json
    assert all(f'"{field}"'.encode() in manifest_json for field in NEW_FIELDS)
    for home in ("one", "two"):
        (tmp_path / home / "models").mkdir(parents=True)

    async with serve_compiler(tmp_path / "one", "--import-root", str(tmp_path)) as (client, _):
        assert (await import_bundle(client, made, "")).digest == digest
    async with run_registry(tmp_path) as address:
        await copy(f"oci:{tmp_path}/one/store:tiny-prod", f"docker://{address}/fleet/tiny:v1")
        await copy(f"docker://{address}/fleet/tiny:v1", f"oci:{tmp_path}/pulled:tiny-v1")
    pulled = Layout(tmp_path / "pulled")
    async with serve_compiler(tmp_path / "two", "--import-root", str(tmp_path)) as (client, _):
        assert (await import_bundle(client, pulled, "tiny-v1")).digest == digest
        response = await client.bundles.GetBundle(pb.GetBundleRequest(ref="tiny@prod"))
        assert (response.bundle.digest, response.bundle.manifest_json) == (digest, manifest_json)
    bundle = open_bundle(Layout(tmp_path / "two" / "store"), digest)
    bundle.verify(BlobVerifier(None))
    assert bundle.manifest_json == manifest_json
