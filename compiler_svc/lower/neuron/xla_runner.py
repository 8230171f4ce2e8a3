"""Runs submodels by XLA on the CPU, in the interpreter with Neuron's packages, where that has torch-xla."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from safetensors.torch import load
from torch import Tensor

from compiler_svc.lower.errors import XlaRunFailed
from compiler_svc.lower.neuron import xla_process
from compiler_svc.lower.neuron.command import XLA_ON_CPU, make_command, make_environment
from compiler_svc.lower.neuron.xla_process import Answer, Hello, Model, XlaStep
from execution.failure import Failure

#: Takes the place of a tag in errors.
_ALL: Final = "any submodel"

MessageT = TypeVar("MessageT")


class XlaRunner:
    """Submodels of all ranks of a model, in a process with torch-xla. Use `xla_runner`."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def open(self, make_module: str, documents: Mapping[str, dict[str, Any]], shards: Sequence[Path]) -> None:
        """Says what to run; see `xla_model.XlaModel`. The KV cache is empty."""
        self._send(Model(make_module=make_module, documents=dict(documents), shards=tuple(map(str, shards))))

    def run(self, tag: str, inputs: Mapping[str, list[float]]) -> dict[str, Tensor]:
        """Runs one step of an executable's submodel.

        Returns:
            Each output of all ranks, [ranks, *shape of the output].

        Raises:
            XlaRunFailed: The process ended, or did not answer in time.
            KilnError: The submodel cannot be made there.
        """
        self._send(XlaStep(tag=tag, inputs=dict(inputs)))
        answer: Answer = _receive(self._connection, Answer, tag, self._timeout_s)  # type: ignore[arg-type]
        if isinstance(answer, Failure):
            raise answer.to_error()
        return load(answer.tensors)

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            # The process has ended: reading its answer says so.
            return


@contextmanager
def xla_runner(directory: Path, *, timeout_s: float) -> Iterator[XlaRunner | None]:
    """Starts the process; None if the interpreter lacks torch-xla. It ends with the block.

    Args:
        directory: Scratch space of the process.
        timeout_s: Longest time of its start, and of one step.

    Raises:
        XlaRunFailed: The interpreter does not start.
    """
    own, theirs = Pipe()
    command = make_command(xla_process.__name__, str(theirs.fileno()))
    with own:
        try:
            with theirs:
                process = subprocess.Popen(
                    command,
                    env=make_environment(directory) | XLA_ON_CPU,
                    stdin=subprocess.DEVNULL,
                    # What packages print belongs into the log.
                    stdout=2,
                    cwd=directory,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            raise XlaRunFailed(_ALL, f"{command[0]} does not start") from error
        try:
            hello = _receive(own, Hello, _ALL, timeout_s)
            yield XlaRunner(own, timeout_s) if hello.has_xla else None
        finally:
            process.kill()
            process.wait()


def _receive(connection: Connection, kind: type[MessageT], tag: str, timeout_s: float) -> MessageT:
    try:
        if not connection.poll(timeout_s):
            raise XlaRunFailed(tag, f"no answer within {timeout_s:g} s")
        return msgspec.msgpack.decode(connection.recv_bytes(), type=kind)
    except (EOFError, OSError):
        raise XlaRunFailed(tag, "the process ended") from None
