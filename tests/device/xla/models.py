"""Models as parameters of tests, from the registry: a family that it gets is tested by itself."""

from __future__ import annotations

from typing import Final

import pytest

from compiler_svc.models.registry import list_families
from tests.contract.families.geometries import GEOMETRIES

#: By their attributes in transformers: all that families are shown with.
MODELS: Final = [
    pytest.param(architecture, attributes, id=f"{architecture.removesuffix('ForCausalLM')}-{name}")
    for architecture in list_families()
    for name, attributes in GEOMETRIES[architecture].items()
]
#: One of each family.
FAMILIES: Final = list({model.values[0]: model for model in reversed(MODELS)}.values())
