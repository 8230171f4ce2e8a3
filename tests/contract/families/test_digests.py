"""A family's graphs and graph ABI stay what they were; `digests.py` says how to write the table of what they are."""

from __future__ import annotations

import torch

from tests.checkpoints.tiny_models import TinyModel
from tests.contract.families.digests import digest_graphs, read_pinned
from tests.contract.families.geometries import Geometry


def test_digests_are_those_that_are_pinned(geometry: Geometry, tiny: TinyModel) -> None:
    pinned = read_pinned()
    release = torch.__version__.partition("+")[0]
    assert release == pinned["torch"].partition("+")[0], "another torch exports other graphs: write the table anew"
    assert digest_graphs(tiny.checkpoint) == pinned["digests"][str(geometry)]
