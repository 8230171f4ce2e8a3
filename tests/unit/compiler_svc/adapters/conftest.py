"""A small model, and an adapter of it."""

from __future__ import annotations

import pytest

from compiler_svc.models.description import ModelDescription
from tests.checkpoints.adapters import WrittenAdapter, make_adapter, with_room
from tests.checkpoints.families import grouped
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("model"), grouped())


@pytest.fixture(scope="session")
def written(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> WrittenAdapter:
    """Of `q_proj` and `down_proj`."""
    path = tmp_path_factory.mktemp("adapter") / "one"
    make_adapter(tiny, path, target_modules=["q_proj", "down_proj"])
    return WrittenAdapter(path)


@pytest.fixture
def description(tiny: TinyModel) -> ModelDescription:
    return with_room(tiny.checkpoint.description)
