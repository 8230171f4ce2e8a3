"""Bundles that earlier releases built: this release reads them, and its runtime generates the same tokens."""

from __future__ import annotations

import asyncio
import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bundle.digest import sha256_bytes
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.servers.runtime import serve_runtime, tokens_of

RELEASES = sorted(path.parent for path in Path(__file__).parent.glob("*/bundles.tar.xz"))
BUNDLES = [
    pytest.param(release, bundle, id=f"{release.name} at {bundle['name']}")
    for release in RELEASES
    for bundle in json.loads((release / "tokens.json").read_text())
]


def unpack(release: Path, directory: Path) -> Layout:
    """Puts a release's layout `store` into a directory."""
    with tarfile.open(release / "bundles.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return Layout(directory / "store")


def test_v0_1_is_among_the_releases() -> None:
    assert "v0.1" in [release.name for release in RELEASES]


@pytest.mark.parametrize(("release", "bundle"), BUNDLES)
async def test_manifests_keep_their_bytes_and_bundles_generate_the_same_tokens(
    tmp_path: Path, forkservers: RankForkservers, release: Path, bundle: dict[str, Any]
) -> None:
    """Alone and in company: the second stream of each prompt samples with a seed."""
    layout = unpack(release, tmp_path)
    assert layout.has(sha256_bytes(open_bundle(layout, bundle["digest"]).manifest.to_json()))
    expected = [one["tokens"] for one in bundle["generations"]]
    start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open)
    async with serve_runtime(tmp_path, start_ranks=start_ranks) as served:
        await served.load(bundle["digest"])

        async def generate(one: dict[str, Any]) -> list[int]:
            return tokens_of(await served.generate(one["prompt"], len(one["tokens"]), **one["sampling"]))

        assert [await generate(one) for one in bundle["generations"]] == expected
        assert await asyncio.gather(*map(generate, bundle["generations"])) == expected
