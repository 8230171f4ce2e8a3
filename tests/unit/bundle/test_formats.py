"""What tensors of weights are kept as, by their dtypes and shapes."""

from __future__ import annotations

import pytest

from bundle.abi.formats import FORMATS, measure_kept


@pytest.mark.parametrize("name", FORMATS)
def test_items_count_with_their_scales(name: str) -> None:
    outputs, inputs, row = 6, 256, FORMATS[name]
    shape = (outputs, inputs // 2) if row.group else (outputs, inputs)
    scales = (outputs, 2 * inputs // row.group) if row.group else (outputs if row.is_per_channel else 1,)
    kept = measure_kept(
        [
            ("up_proj.weight", row.item, shape),
            ("up_proj.scale", "float32", scales),
            ("up_proj.bias", "bfloat16", (outputs,)),
            ("norm.weight", "bfloat16", (inputs,)),
        ]
    )
    items = outputs * inputs // (2 if row.group else 1)
    num_scales = outputs * 2 * inputs // row.group if row.group else scales[0]
    assert kept == {row.title: items + 4 * num_scales, "bfloat16": 2 * (outputs + inputs)}
