"""Every test of a family takes a geometry, or the model that it describes."""

from __future__ import annotations

import pytest

from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.contract.families.geometries import Geometry, parameters


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each test its geometries: all, or those with the attribute that its module names as `ATTRIBUTE`."""
    if "geometry" in metafunc.fixturenames:
        own = parameters(metafunc.function.__name__, getattr(metafunc.module, "ATTRIBUTE", None))
        metafunc.parametrize("geometry", own, scope="module")


@pytest.fixture(scope="module")
def tiny(geometry: Geometry, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("model")
    return write_tiny_model(path, geometry.attributes, architecture=geometry.architecture)
