"""Toy bundles, lowered once a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler_svc.lower.pool import LoweringPool
from tests.execution.toy import Picks, ToyBundle, make_bundle, stage_toy

MakeToy = Callable[[Picks, int], ToyBundle]


@pytest.fixture(scope="session")
def lowering_cache(request: pytest.FixtureRequest) -> Path:
    """Precompiled headers, kept from run to run."""
    return Path(request.config.cache.mkdir("lowering"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory, lowering_cache: Path) -> MakeToy:
    """Makes a bundle of each kind at its first use."""
    made: dict[tuple[Picks, int], ToyBundle] = {}

    def make(picks: Picks, level: int) -> ToyBundle:
        if (picks, level) not in made:
            directory = tmp_path_factory.mktemp(f"{picks}-O{level}")
            jobs = stage_toy(directory, lowering_cache, picks, level)
            executables = asyncio.run(LoweringPool(num_processes=2, timeout_s=240).lower(jobs))
            made[picks, level] = make_bundle(executables, picks, directory / "bundle")
        return made[picks, level]

    return make
