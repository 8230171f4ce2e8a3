"""KV caches that keep bytes, on an XLA device, against the same modules on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from compiler_svc.models.state import KeptAs
from compiler_svc.models.transforms import ModelChanges
from tests.checkpoints.cache_scales import add_cache_scales
from tests.checkpoints.tiny_models import GEOMETRIES as LLAMA
from tests.checkpoints.tiny_models import write_tiny_model
from tests.device.xla.models import FAMILIES
from tests.device.xla.test_submodels import TOKEN_BUCKET, check

CAST: Final = KeptAs(dtype="float8_e4m3fn")
#: A block holds a sequence.
BLOCKS: Final = {"num_blocks": 6, "block_tokens": TOKEN_BUCKET}
#: Where sums differ in their last bits, what lies in the middle between two bytes becomes the other one now and then.
LIMITS: Final = {"float32": 1e-3, "bfloat16": 5e-2}


@pytest.mark.parametrize(("architecture", "attributes"), FAMILIES)
def test_keys_and_values_are_cast(architecture: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, attributes, architecture=architecture)
    check(tiny, model_changes=ModelChanges(kept=CAST), limit=LIMITS["float32"])


@pytest.mark.parametrize(
    ("kept", "options"),
    [
        (CAST, BLOCKS),
        (CAST, {"dtype": "bfloat16"}),
        (KeptAs(dtype="int8", key_scales="head", value_scales="channel"), {}),
        (KeptAs(dtype="int8", key_scales="tensor", value_scales="head"), {"tp_degree": 2, "rank": 1}),
        (KeptAs(dtype="float8_e4m3fn", key_scales="channel", value_scales="tensor"), BLOCKS),
    ],
    ids=["blocks", "bfloat16", "int8", "int8-second-rank", "float8-scaled-blocks"],
)
def test_layouts_and_scales(kept: KeptAs, options: dict[str, Any], tmp_path: Path) -> None:
    dtype = options.get("dtype", "float32")
    tiny = write_tiny_model(tmp_path, LLAMA["gqa-llama3-tied"], dtype=getattr(torch, dtype))
    tiny, _ = add_cache_scales(tiny, tmp_path, kept)
    check(tiny, model_changes=ModelChanges(kept=kept), limit=LIMITS[dtype], **options)
