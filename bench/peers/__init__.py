"""The peers that Kiln is compared with, in environments of their own, because their requirements differ from ours.

Each is a worker with the actions of `bench.eager`; `load` converts the checkpoint first, unless that was done.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ENVIRONMENTS: Final = Path(__file__).parents[2] / ".kiln"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that Kiln is compared with. `environment` is its virtual environment; None is the project's own."""

    title: str
    module: str
    environment: Path | None

    @property
    def python(self) -> Path:
        """The interpreter that runs the worker."""
        return Path(sys.executable) if self.environment is None else self.environment / "bin" / "python"


PEERS: Final = {
    "eager": Peer("transformers eager", "bench.eager", None),
    "openvino": Peer("OpenVINO GenAI", "bench.peers.openvino", _ENVIRONMENTS / "bench-peers"),
    "llama_cpp": Peer("llama.cpp", "bench.peers.llama_cpp", _ENVIRONMENTS / "bench-peers"),
    "vllm": Peer("vLLM on CPU", "bench.peers.vllm", _ENVIRONMENTS / "bench-vllm"),
}
