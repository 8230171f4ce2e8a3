"""`python -m compiler_svc.lower.neuron.xla_process FD`: runs submodels by XLA on the CPU, for the process that calls.

Messages are msgpack, over the connection whose descriptor is FD. The first answer is a `Hello`; if torch-xla is there,
the caller sends a `Model` then, and steps. A named error is an answer; any other ends the process with a traceback.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save

from bundle.errors import KilnError
from compiler_svc.lower.neuron.xla_model import PACKAGE, XlaModel
from execution.failure import Failure


class Hello(msgspec.Struct, frozen=True):
    """What the interpreter has.

    Attributes:
        has_xla: Whether torch-xla is there.
    """

    has_xla: bool


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model to run; see `xla_model.XlaModel`."""

    make_module: str
    documents: dict[str, dict[str, Any]]
    shards: tuple[str, ...]


class XlaStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the executable with a tag; `inputs` are row-major."""

    tag: str
    inputs: dict[str, list[float]]


class XlaResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outputs of a step as a safetensors file: what every rank returned, [ranks, *shape of the output]."""

    tensors: bytes


#: What a step comes to.
Answer = XlaResult | Failure


def main(fd: int) -> None:
    """Answers the caller until it closes the connection."""
    with Connection(fd) as caller:
        caller.send_bytes(msgspec.msgpack.encode(Hello(has_xla=find_spec(PACKAGE) is not None)))
        try:
            order = msgspec.msgpack.decode(caller.recv_bytes(), type=Model)
            model = XlaModel(order.make_module, order.documents, [Path(shard) for shard in order.shards])
            while True:
                step = msgspec.msgpack.decode(caller.recv_bytes(), type=XlaStep)
                caller.send_bytes(msgspec.msgpack.encode(_answer(model, step)))
        except EOFError:
            # The caller has what it wanted, or is gone.
            return


def _answer(model: XlaModel, step: XlaStep) -> Answer:
    try:
        outputs = model.run(step.tag, step.inputs)
    except KilnError as error:
        return Failure.of(error)
    return XlaResult(tensors=save({name: tensor.contiguous() for name, tensor in outputs.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
