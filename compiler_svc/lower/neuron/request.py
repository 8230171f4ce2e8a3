"""What this compiler asks of the interpreter with Neuron's packages, and its answer, as JSON in a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from bundle.abi.neff import NeffProgram
from bundle.host.path_texts import read_path, write_path
from bundle.manifest import TargetKind
from compiler_svc.lower.errors import FrontEndNotServed
from compiler_svc.lower.neuron.hlo_check import Finding
from execution.failure import Failure

_REQUEST_FILE: Final = "neuron_request.json"
_ANSWER_FILE: Final = "neuron_answer.json"

#: The front ends that make a NEFF of a submodel, each a `CompileSubmodel` as `module:function`.
FRONT_ENDS: Final[Mapping[str, str]] = MappingProxyType(
    {"model_builder": "compiler_svc.lower.neuron.model_builder:compile_submodel"}
)
#: Names that later front ends will have. TorchNeuron has no documented call that returns a NEFF with its tensors.
RESERVED_FRONT_ENDS: Final = ("torch_neuron",)


class GraphRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One submodel whose graph is traced and checked, and not compiled.

    Attributes:
        make_module: `module:function` that makes a `compiler_svc.lower.neuron.submodel.Submodel` of the document.
        memory_bytes: Memory of one logical core; None if it is not known.
        top_k: How the graph takes candidates; see `targets.neuron.TOP_K_WAYS`.
    """

    tag: str
    make_module: str
    document: dict[str, Any]
    target: TargetKind
    memory_bytes: int | None
    top_k: str


class NeuronRequest(GraphRequest, frozen=True, kw_only=True, tag=True):
    """One submodel to make a NEFF of; `directory` receives the compiler's files."""

    front_end: str
    flags: tuple[str, ...]
    logical_nc_config: int
    tp_degree: int
    directory: Path


class NeuronExecutable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A NEFF and what a runtime and a reader need to know of it. It was made of `graph`, a serialized HLO module; by
    `metaneff` Neuron's own runtime of PyTorch finds its tensors.
    """

    neff: Path
    graph: Path
    metaneff: Path
    program: NeffProgram


class CheckedGraph(msgspec.Struct, frozen=True, tag=True):
    """What the check of a graph has found, in the order of its operations."""

    findings: tuple[Finding, ...]


#: What a request comes to.
Answer = NeuronExecutable | CheckedGraph | Failure
#: A front end. Raises the errors of Neuron in `compiler_svc.lower.errors`.
CompileSubmodel = Callable[[NeuronRequest], NeuronExecutable]


def find_front_end(name: str) -> str:
    """Finds a front end's `module:function`."""
    if name not in FRONT_ENDS:
        raise FrontEndNotServed(name, tuple(FRONT_ENDS))
    return FRONT_ENDS[name]


def write_request(request: GraphRequest, directory: Path) -> None:
    """Writes the request where `read_request` finds it."""
    (directory / _REQUEST_FILE).write_bytes(msgspec.json.encode(request, enc_hook=write_path))


def read_request(directory: Path) -> GraphRequest | NeuronRequest:
    """Reads the request in a directory."""
    data = (directory / _REQUEST_FILE).read_bytes()
    return msgspec.json.decode(data, type=GraphRequest | NeuronRequest, dec_hook=read_path)


def write_answer(answer: Answer, directory: Path) -> None:
    """Writes the answer where `read_answer` finds it."""
    (directory / _ANSWER_FILE).write_bytes(msgspec.json.encode(answer, enc_hook=write_path))


def read_answer(directory: Path) -> Answer | None:
    """Reads the answer in a directory; None if the interpreter ended without one."""
    path = directory / _ANSWER_FILE
    if not path.exists():
        return None
    answer: Answer = msgspec.json.decode(path.read_bytes(), type=Answer, dec_hook=read_path)
    return answer
