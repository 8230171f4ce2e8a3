"""A whole build of each family at -O1: its graph ABI is pinned, and where the host is alike its whole manifest is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bundle.manifest import Manifest
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from tests.checkpoints.tiny_models import write_tiny_model
from tests.contract.families.digests import NEURON_CONFIG, read_pinned
from tests.contract.families.geometries import FIRST
from tests.servers.compiler_process import run_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: By geometry, what a manifest's digest depends on besides the code, and that digest.
PATH = Path(__file__).with_name("pinned_bundles.json")
WRITE = f"if that is meant, write them anew: python -m {__spec__.name}"


def describe(digest: str, manifest: Manifest) -> dict[str, object]:
    host = {"toolchain": manifest.toolchain, "isa": manifest.target.isa, "checkpoint": manifest.checkpoint_digest}
    return {"host": host, "manifest": digest}


async def build(home: Path) -> dict[str, tuple[str, Manifest]]:
    """Builds the first geometry of each family; gives digest and manifest of each bundle."""
    built = {}
    async with run_compiler(home) as compiler:
        for geometry in FIRST:
            architecture = geometry.architecture
            write_tiny_model(home / "models" / architecture, geometry.attributes, architecture=architecture)
            result = await compiler.client.build(model=architecture, neuron_config=NEURON_CONFIG, salt="pinned")
            digest = result.digest
            built[str(geometry)] = digest, open_bundle(Layout(home / "store"), digest).manifest
    return built


def test_builds_give_the_bundles_that_are_pinned(tmp_path: Path) -> None:
    built = asyncio.run(build(tmp_path))
    pinned = json.loads(PATH.read_text())
    assert built.keys() == pinned.keys(), WRITE
    graphs = {name: pinned for name, pinned in read_pinned()["digests"].items() if name in built}
    assert {name: manifest.graph_abi_digest for name, (_, manifest) in built.items()} == {
        name: pinned["abi"] for name, pinned in graphs.items()
    }
    described = {name: describe(digest, manifest) for name, (digest, manifest) in built.items()}
    others = {name: one for name, one in described.items() if one["host"] != pinned[name]["host"]}
    assert described == pinned | others, WRITE


def write() -> None:
    with TemporaryDirectory() as home:
        built = asyncio.run(build(Path(home)))
    described = {name: describe(digest, manifest) for name, (digest, manifest) in built.items()}
    PATH.write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    write()
