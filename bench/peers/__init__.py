"""The peers that Kiln is compared with, in environments of their own, because their requirements differ from ours.

Each is a worker with the actions of `bench.eager`; `load` converts the checkpoint first, unless that was done.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: The peers' word for an adapter beside plain weights.
LORA: Final = "lora"
ADAPTER_RANK: Final = 16
#: What the name of the directory adds to a checkpoint's that has its adapters by number, in PEFT's format.
ADAPTERS: Final = "-adapters"

_ENVIRONMENTS: Final = Path(__file__).parents[2] / ".kiln"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that Kiln is compared with.

    Attributes:
        environment: Its virtual environment; None is the project's own.
        imports: What its worker imports of it.
    """

    title: str
    module: str
    environment: Path | None
    imports: tuple[str, ...]

    @property
    def python(self) -> Path:
        """The interpreter that runs the worker."""
        return Path(sys.executable) if self.environment is None else self.environment / "bin" / "python"

    def list_missing(self) -> tuple[str, ...]:
        """Lists what its worker could not import, without importing it."""
        if not self.python.exists():
            return self.imports
        command = [str(self.python), "-c", _LIST_MISSING, *self.imports]
        return tuple(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split())


_LIST_MISSING: Final = (
    "import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if not find_spec(n)))"
)
_CONVERTERS: Final = _ENVIRONMENTS / "bench-peers"
PEERS: Final = {
    "eager": Peer("transformers eager", "bench.eager", None, ("transformers",)),
    "openvino": Peer(
        "OpenVINO GenAI",
        "bench.peers.openvino",
        _CONVERTERS,
        ("openvino_genai", "openvino_tokenizers", "optimum", "nncf"),
    ),
    "llama_cpp": Peer("llama.cpp", "bench.peers.llama_cpp", _CONVERTERS, ("llama_cpp", "gguf")),
    "vllm": Peer("vLLM on CPU", "bench.peers.vllm", _ENVIRONMENTS / "bench-vllm", ("vllm",)),
}


def find_missing(names: Iterable[str]) -> dict[str, str]:
    """Says, of each peer that is not installed, what it lacks and how to install it."""
    lacking = {name: PEERS[name].list_missing() for name in names}
    return {
        name: f"not installed, {', '.join(packages)} missing: `python -m bench.peers.install`"
        for name, packages in lacking.items()
        if packages
    }
