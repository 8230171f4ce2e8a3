"""Fetched checkpoints take no more than they may: those used longest ago go, and none that is in use."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bundle.errors import ResourcesShort
from compiler_svc.remote.errors import ModelFetchFailed
from compiler_svc.remote.fetching import fetch_outline, fetch_whole
from compiler_svc.remote.room import lock_of, part_of, reserving, using
from tests.checkpoints.random_weights import write_checkpoint

PREFIXES = ("file:///",)
URL = "file:///somewhere"


class Kept:
    """A directory of fetched checkpoints, and the remote ones."""

    def __init__(self, path: Path) -> None:
        self.directory = path / "kept"
        self.urls = {name: f"file://{write_checkpoint(path / name, seed=len(name))}" for name in ("a", "bb", "ccc")}
        self.keys = {name: fetch_outline(url, PREFIXES, path / "outlines").name for name, url in self.urls.items()}
        self.sizes = {name: sum(file.stat().st_size for file in (path / name).iterdir()) for name in self.urls}

    def fetch(self, name: str, max_bytes: int | None) -> Path:
        return fetch_whole(self.urls[name], self.keys[name], PREFIXES, self.directory, max_bytes)

    def list_names(self) -> set[str]:
        there = {path.name for path in self.directory.iterdir() if path.suffix != ".lock"}
        assert there <= set(self.keys.values()), "nothing unfinished is left"
        return {name for name, key in self.keys.items() if key in there}

    async def use(self, name: str, at_s: int) -> None:
        async with using(self.directory, self.keys[name]):
            pass
        os.utime(self.directory / f".{self.keys[name]}.use.lock", (at_s, at_s))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


async def test_those_used_longest_ago_go_first(kept: Kept) -> None:
    for_two = sum(kept.sizes.values()) - 1
    for name in ("a", "bb"):
        kept.fetch(name, for_two)
    await kept.use("bb", at_s=1000)
    await kept.use("a", at_s=2000)
    kept.fetch("ccc", for_two)
    assert kept.list_names() == {"a", "ccc"}
    await kept.use("ccc", at_s=1500)
    kept.fetch("bb", for_two)
    assert kept.list_names() == {"a", "bb"}
    # What is there already needs no room.
    kept.fetch("a", 1)
    kept.fetch("ccc", None)
    assert kept.list_names() == {"a", "bb", "ccc"}


async def test_none_that_is_in_use_goes(kept: Kept) -> None:
    for_two = sum(kept.sizes.values()) - 1
    for name in ("a", "bb"):
        kept.fetch(name, for_two)
    await kept.use("bb", at_s=int(2e9))
    async with AsyncExitStack() as uses:
        # Two builds of one checkpoint.
        for _ in range(2):
            await uses.enter_async_context(using(kept.directory, kept.keys["a"]))
        kept.fetch("ccc", for_two)
        assert kept.list_names() == {"a", "ccc"}
        await uses.enter_async_context(using(kept.directory, kept.keys["ccc"]))
        with pytest.raises(ResourcesShort) as caught:
            kept.fetch("bb", for_two)
        used = kept.sizes["a"] + kept.sizes["ccc"]
        assert f"{kept.sizes['bb']} bytes to fetch, {for_two} for all, {used} in use" in str(caught.value)
        assert kept.list_names() == {"a", "ccc"}
    kept.fetch("bb", for_two)
    assert len(kept.list_names()) == 2


def test_one_that_alone_takes_more_is_refused(kept: Kept) -> None:
    kept.fetch("a", None)
    with pytest.raises(ModelFetchFailed) as caught:
        kept.fetch("bb", kept.sizes["bb"] - 1)
    assert f"it has {kept.sizes['bb']} bytes, and all fetched checkpoints may have {kept.sizes['bb'] - 1}" in str(
        caught.value
    )
    assert kept.list_names() == {"a"}
    kept.fetch("bb", kept.sizes["bb"])
    assert kept.list_names() == {"bb"}


def test_fetches_at_once_share_the_room(kept: Kept) -> None:
    kept.fetch("a", None)
    first, second = kept.keys["bb"], kept.keys["ccc"]
    with reserving(kept.directory, first, 600, url=URL, max_bytes=1000 + kept.sizes["a"]):
        with (
            pytest.raises(ResourcesShort, match=f"600 bytes to fetch, {1000} for all, 600 in use"),
            reserving(kept.directory, second, 600, url=URL, max_bytes=1000),
        ):
            pass
        assert kept.list_names() == set()
        with reserving(kept.directory, second, 400, url=URL, max_bytes=1000):
            pass
    # The kernel unlocks what a killed process has locked.
    (kept.directory / f".{first}.room.lock").write_text("600")
    with reserving(kept.directory, second, 600, url=URL, max_bytes=1000):
        assert not (kept.directory / f".{first}.room.lock").exists()


async def test_one_whose_fetch_or_removal_runs_stays(kept: Kept) -> None:
    kept.fetch("a", None)
    key = kept.keys["a"]
    with lock_of(part_of(kept.directory, key)):
        with pytest.raises(ResourcesShort):
            kept.fetch("bb", kept.sizes["bb"])
        assert kept.list_names() == {"a"}
    async with asyncio.timeout(30), using(kept.directory, key):
        assert kept.list_names() == {"a"}
