"""Quantized weights on an XLA device: each item type with one scale and with one for each output, of several families,
dtypes and degrees by a covering array, against the reference on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from bundle.abi.formats import FORMATS
from compiler_svc.models.transforms import ModelChanges, Quantization
from tests.checkpoints.tiny_models import write_tiny_model
from tests.covering import cover
from tests.device.xla.models import FAMILIES
from tests.device.xla.test_submodels import TOLERANCE, check

#: Ranks divide outputs or inputs of their matrices; some are stored transposed, or as one of which others are parts.
SHOWN: Final = ("LlamaForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM", "CohereForCausalLM")
#: Products are rounded before they are scaled, as they are once on the CPU.
LIMITS: Final = {"float32": TOLERANCE, "bfloat16": 5e-2}
CASES: Final = cover(
    {
        "family": SHOWN,
        "item": sorted({row.item for row in FORMATS.values() if not row.group}),
        "is_per_channel": (False, True),
        "dtype": tuple(LIMITS),
        "tp_degree": (1, 2),
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_format(case: dict[str, Any], tmp_path: Path) -> None:
    (attributes,) = (model.values[1] for model in FAMILIES if model.values[0] == case["family"])
    (format_,) = (
        name
        for name, row in FORMATS.items()
        if (row.item, row.is_per_channel) == (case["item"], case["is_per_channel"]) and not row.group
    )
    dtype = case["dtype"]
    tiny = write_tiny_model(tmp_path, attributes, architecture=case["family"], dtype=getattr(torch, dtype))
    check(
        tiny,
        rank=case["tp_degree"] - 1,
        model_changes=ModelChanges(quantization=Quantization(format=format_)),
        limit=LIMITS[dtype],
        dtype=dtype,
        tp_degree=case["tp_degree"],
    )
