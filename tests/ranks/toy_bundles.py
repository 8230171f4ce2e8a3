"""Toy bundles, lowered once a run, and what ranks that run them are forked from."""

from __future__ import annotations

import asyncio
import fcntl
import pickle
from pathlib import Path
from typing import Protocol

import pytest

from compiler_svc.lower.pool import LoweringPool
from execution.forkserver.client import ForkserverClient
from tests.lowering_cache import LOWERING_CACHE
from tests.ranks.toy import Picks, ToyBundle, make_bundle, stage_toy


class MakeToy(Protocol):
    def __call__(self, picks: Picks, level: int, tp_degree: int = 1) -> ToyBundle: ...


@pytest.fixture(scope="session")
def toy_directory(run_directory: Path) -> Path:
    """The directory of toy bundles; one for all workers of a run."""
    directory = run_directory / "toys"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def toy(toy_directory: Path, lowerings: ForkserverClient) -> MakeToy:
    """Makes a bundle of each kind at its first use by any worker."""

    def make(picks: Picks, level: int, tp_degree: int = 1) -> ToyBundle:
        directory = toy_directory / f"{picks}-O{level}-tp{tp_degree}"
        record = directory.with_suffix(".pickle")
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not record.exists():
                jobs = stage_toy(directory, LOWERING_CACHE, picks, level, tp_degree)
                executables = asyncio.run(LoweringPool(lowerings, num_processes=2, timeout_s=240).lower(jobs))
                record.write_bytes(pickle.dumps(make_bundle(executables, picks, directory / "bundle", tp_degree)))
        made: ToyBundle = pickle.loads(record.read_bytes())
        return made

    return make
