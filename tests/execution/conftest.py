"""Toy bundles, lowered once a session, and what ranks that run them are forked from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from compiler_svc.lower.pool import LoweringPool
from execution.rank_nursery import RankNursery
from tests.execution.toy import Picks, ToyBundle, make_bundle, stage_toy


class MakeToy(Protocol):
    def __call__(self, picks: Picks, level: int, tp_degree: int = 1) -> ToyBundle: ...


@pytest.fixture(scope="session")
def lowering_cache(request: pytest.FixtureRequest) -> Path:
    """Precompiled headers, kept from run to run."""
    return Path(request.config.cache.mkdir("lowering"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory, lowering_cache: Path) -> MakeToy:
    """Makes a bundle of each kind at its first use."""
    made: dict[tuple[Picks, int, int], ToyBundle] = {}

    def make(picks: Picks, level: int, tp_degree: int = 1) -> ToyBundle:
        kind = (picks, level, tp_degree)
        if kind not in made:
            directory = tmp_path_factory.mktemp(f"{picks}-O{level}-tp{tp_degree}")
            jobs = stage_toy(directory, lowering_cache, picks, level, tp_degree)
            executables = asyncio.run(LoweringPool(num_processes=2, timeout_s=240).lower(jobs))
            made[kind] = make_bundle(executables, picks, directory / "bundle", tp_degree)
        return made[kind]

    return make


@pytest.fixture(scope="module")
def nursery() -> Iterator[RankNursery]:
    """Where the groups of a module come from, as those of a runtime do: torch is loaded once for all of them."""
    with RankNursery() as nursery:
        yield nursery
