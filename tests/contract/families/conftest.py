"""Fixtures of every test of a family."""

from __future__ import annotations

import pytest

from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.contract.families.geometries import Geometry, parameters


@pytest.fixture(scope="module", params=parameters())
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return request.param


@pytest.fixture(scope="module")
def tiny(geometry: Geometry, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("model")
    return write_tiny_model(path, geometry.attributes, architecture=geometry.architecture)
