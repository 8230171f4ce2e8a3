"""The doubles of what tracing and compiling give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuronx_distributed.recorded import as_recorded

_MODULE = "neuronx_distributed.trace.model_builder_utils"


class TraceArtifacts:
    @as_recorded(_MODULE, "TraceArtifacts")
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class CompilationArtifacts:
    @as_recorded(_MODULE, "CompilationArtifacts")
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    @as_recorded(_MODULE, "CompilationArtifacts")
    def get_neff_bytes(self) -> bytes:
        return Path(self.neff_filepath).read_bytes()
