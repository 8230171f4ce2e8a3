"""The double of the context in which models are traced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuronx_distributed.recorded import as_recorded

_MODULE = "neuronx_distributed.trace.parallel_context"

#: The contexts that are entered; upstream mocks torch.distributed for the whole process meanwhile.
ENTERED: list[Mapping[str, Any]] = []


class NxDParallelState:
    @as_recorded(_MODULE, "NxDParallelState")
    def __init__(self, **given: Any) -> None:
        self._given = given

    @as_recorded(_MODULE, "NxDParallelState")
    def __enter__(self) -> NxDParallelState:
        assert not ENTERED, "one trace at a time"
        ENTERED.append(self._given)
        Path("parallel_state.json").write_text(json.dumps(self._given))
        return self

    @as_recorded(_MODULE, "NxDParallelState")
    def __exit__(self, **_: Any) -> None:
        ENTERED.pop()
