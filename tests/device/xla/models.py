"""Models as parameters of tests: a family that the table of them gets is tested by itself."""

from __future__ import annotations

from typing import Final

import pytest

from tests.checkpoints.families import FAMILIES as SHOWN

#: By their attributes in transformers: all that families are shown with. Their order chooses the cases of `graphs.txt`
#: so it is not the registry's, which follows the names of files.
MODELS: Final = [
    pytest.param(architecture, attributes, id=f"{architecture.removesuffix('ForCausalLM')}-{name}")
    for architecture in sorted(SHOWN, key=str.lower)
    for name, attributes in SHOWN[architecture].geometries.items()
]
#: One of each family.
FAMILIES: Final = list({model.values[0]: model for model in reversed(MODELS)}.values())
