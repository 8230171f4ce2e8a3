"""Runs submodels by XLA on the CPU, in the interpreter with Neuron's packages, where that has torch-xla."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from safetensors.torch import load
from torch import Tensor

from compiler_svc.lower.errors import XlaRunFailed
from compiler_svc.lower.neuron import xla_process
from compiler_svc.lower.neuron.command import XLA_ON_CPU, make_command, make_environment
from compiler_svc.lower.neuron.xla_process import Model, XlaStep, XlaWrite, decode_hello, decode_result
from execution.failure import Failure
from execution.forkserver.worker import Channel
from execution.step import StepInputs

#: Takes the place of a tag in errors.
_ALL: Final = "any submodel"

MessageT = TypeVar("MessageT")


class XlaRunner:
    """Submodels of all ranks of a model, in a process with torch-xla. Use `xla_runner`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def open(self, make_module: str, documents: Mapping[str, dict[str, Any]], shards: Sequence[Path]) -> None:
        """Says what to run; see `xla_model.XlaModel`. The KV cache is empty."""
        self._send(Model(make_module=make_module, documents=dict(documents), shards=tuple(map(str, shards))))

    def run(self, tag: str, inputs: StepInputs) -> dict[str, Tensor]:
        """Runs one step of an executable's submodel; returns each output of all ranks, [ranks, *shape of the output].

        Raises:
            XlaRunFailed: The process ended, or did not answer in time.
            KilnError: The submodel cannot be made there.
        """
        return self._ask(XlaStep(tag=tag, inputs={name: values.tolist() for name, values in inputs.items()}), tag)

    def write_adapter(self, slot: int, paths_by_rank: Mapping[int, Path]) -> None:
        """Writes an adapter's files into a slot of every rank, once a step has run.

        Raises:
            XlaRunFailed: The process ended, or did not answer in time.
        """
        self._ask(XlaWrite(slot=slot, paths=tuple(str(paths_by_rank[rank]) for rank in sorted(paths_by_rank))), _ALL)

    def _ask(self, call: XlaStep | XlaWrite, tag: str) -> dict[str, Tensor]:
        self._send(call)
        answer = _receive(self._channel, decode_result, tag)
        if isinstance(answer, Failure):
            raise answer.to_error()
        return load(answer.tensors)

    def _send(self, message: Model | XlaStep | XlaWrite) -> None:
        # If the process has ended, reading its answer says so.
        with suppress(OSError):
            self._channel.send(message)


@contextmanager
def xla_runner(directory: Path, *, timeout_s: float) -> Iterator[XlaRunner | None]:
    """Starts the process, with scratch space in `directory`; None if the interpreter lacks torch-xla. It ends with the
    block. `timeout_s` is the longest time of its start, and of one step.

    Raises:
        XlaRunFailed: The interpreter does not start.
    """
    own, theirs = socket.socketpair()
    command = make_command(xla_process.__name__, str(theirs.fileno()))
    with Channel(own.detach(), timeout_s) as channel:
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
            hello = _receive(channel, decode_hello, _ALL)
            yield XlaRunner(channel) if hello.has_xla else None
        finally:
            process.kill()
            process.wait()


def _receive(channel: Channel, decode: Callable[[bytes], MessageT], tag: str) -> MessageT:
    try:
        return channel.receive(decode)
    except TimeoutError:
        raise XlaRunFailed(tag, f"no answer within {channel.timeout_s:g} s") from None
    except (EOFError, OSError):
        raise XlaRunFailed(tag, "the process ended") from None
