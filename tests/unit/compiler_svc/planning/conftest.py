import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler_svc.database.engine import Database
from compiler_svc.planning.planner import Planner
from tests.checkpoints.headers import (
    EAGLE_70B,
    EAGLE_70B_SHAPES,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_70B_SHARDS,
    write_headers,
)
from tests.checkpoints.random_weights import write_checkpoint
from tests.unit.compiler_svc.planning.planning import open_planner


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of Llama 3, `1b`, `8b` and `70b`, of an `eagle` draft of the last, and `tiny`, which has weights."""
    root = tmp_path_factory.mktemp("models")
    write_headers(root / "1b", LLAMA_1B)
    write_headers(root / "eagle", EAGLE_70B, shapes=EAGLE_70B_SHAPES)
    write_headers(root / "8b", LLAMA_8B)
    write_headers(root / "70b", LLAMA_70B, num_shards=LLAMA_70B_SHARDS)
    write_checkpoint(root / "tiny")
    return root


@pytest.fixture(scope="session")
def pickled(models: Path) -> str:
    """A checkpoint whose weights plans do not open."""
    directory = models / "pickled"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA_1B))
    (directory / "pytorch_model.bin").write_bytes(b"never opened")
    return directory.name


@pytest.fixture(scope="session")
def planner(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Planner]:
    """A planner with an empty cache, which plans leave empty."""
    with open_planner(tmp_path_factory.mktemp("planner"), models) as planner:
        yield planner


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'kiln.db'}")
    yield database
    database.close()


@pytest.fixture
def adapters(models: Path) -> Path:
    """Adapters of LoRA below the model root, whose weights are empty files."""
    directory = models / "adapters"
    for name, config in {
        "r8": {"r": 8},
        "r64": {"r": 64},
        "by_module": {"r": 8, "rank_pattern": {"q_proj": 32}},
        "broken": {"r": "many"},
    }.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "adapter_config.json").write_text(json.dumps(config))
        (directory / name / "adapter_model.safetensors").touch()
    listing = {
        "lora-ckpt-dir": "adapters",
        "lora-ckpt-paths": {"a": "r8", "c": "r8"},
        "lora-ckpt-paths-cpu": {"b": "r64"},
    }
    (directory / "listing.json").write_text(json.dumps(listing))
    return directory
