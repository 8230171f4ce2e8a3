from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler_svc.planning.planner import Planner
from tests.compiler_svc.header_checkpoint import LLAMA_8B, LLAMA_70B, LLAMA_70B_SHARDS, write_headers
from tests.compiler_svc.planning.planning import open_planner
from tests.compiler_svc.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of Llama 3.1, `8b` and `70b`, and `tiny`, which has weights."""
    root = tmp_path_factory.mktemp("models")
    write_headers(root / "8b", LLAMA_8B)
    write_headers(root / "70b", LLAMA_70B, num_shards=LLAMA_70B_SHARDS)
    write_checkpoint(root / "tiny")
    return root


@pytest.fixture(scope="session")
def planner(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Planner]:
    """A planner with an empty cache, which plans leave empty."""
    with open_planner(tmp_path_factory.mktemp("planner"), models) as planner:
        yield planner
