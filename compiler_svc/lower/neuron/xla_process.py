"""`python -m compiler_svc.lower.neuron.xla_process FD`: runs submodels by XLA on the CPU, for the process that calls.

It says `Hello` over the channel whose descriptor is FD; if torch-xla is there, the caller sends a `Model` then, which
has no answer, and steps. A named error is an answer; any other ends the process with a traceback.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save

from compiler_svc.lower.neuron.xla_model import PACKAGE, XlaModel
from execution.failure import Failure
from execution.forkserver.worker import Channel, serve_calls


class Hello(msgspec.Struct, frozen=True):
    """What the interpreter has: whether torch-xla is there."""

    has_xla: bool


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model to run; see `xla_model.XlaModel`."""

    make_module: str
    documents: dict[str, dict[str, Any]]
    shards: tuple[str, ...]


class XlaStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One step of the executable with a tag; `inputs` are row-major."""

    tag: str
    inputs: dict[str, list[float]]


class XlaWrite(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An adapter to write into a slot: the safetensors file of each rank. Its answer has no outputs."""

    slot: int
    paths: tuple[str, ...]


class XlaResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outputs of a step as a safetensors file: what every rank returned, [ranks, *shape of the output]."""

    tensors: bytes


decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_result = msgspec.msgpack.Decoder[XlaResult | Failure](XlaResult | Failure).decode


def main(fd: int) -> None:
    """Answers the caller until it hangs up: it has what it wanted, or is gone."""
    with Channel(fd) as caller, suppress(EOFError):
        caller.send(Hello(has_xla=find_spec(PACKAGE) is not None))
        order = caller.receive(msgspec.msgpack.Decoder(Model).decode)
        model = XlaModel(order.make_module, order.documents, [Path(shard) for shard in order.shards])

        def answer(call: XlaStep | XlaWrite, _report: object) -> XlaResult:
            if isinstance(call, XlaWrite):
                model.write_adapter(call.slot, [Path(path) for path in call.paths])
                return XlaResult(tensors=save({}))
            outputs = model.run(call.tag, call.inputs)
            return XlaResult(tensors=save({name: tensor.contiguous() for name, tensor in outputs.items()}))

        serve_calls(caller, msgspec.msgpack.Decoder[XlaStep | XlaWrite](XlaStep | XlaWrite).decode, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
