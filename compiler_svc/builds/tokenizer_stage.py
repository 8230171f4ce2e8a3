"""The stage that gives a checkpoint a `tokenizer.json`, which is the only form that runtimes read."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from bundle.confinement import TEXT
from compiler_svc.builds.tokenizer_converter import Answer, Converted, NotConverted, OutOfMemory
from compiler_svc.models.registry import find_family
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.tokenizer_sources import TOKENIZER_FILE, TokenizerSource, find_source
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import ForkserverClient
from execution.forkserver.protocol import Call
from execution.stall import Watch, read_cpu_s
from execution.text.errors import TextLimitExceeded, TextProcessLost
from execution.text.handle import CLOCK_FACTOR, TextLimits

_PROCESS: Final = "compiler_svc.builds.tokenizer_converter:convert_files"
_WORK: Final = "converting the tokenizer"
_MAX_ANSWER_BYTES: Final = 1 << 28
#: Looks at the processor time of a conversion, until its limit.
_LOOKS: Final = 20
_ACCEPTED: Final = f"what converts within the limits of a text process, or a {TOKENIZER_FILE} beside it"
#: How libraries end a process: by what they were given, or for want of memory.
_FAILURES: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def convert_tokenizer(
    checkpoint: Checkpoint, directory: Path, forkserver: ForkserverClient, limits: TextLimits | None = None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Converts a checkpoint's tokenizer, if it has one, and none in the form of `tokenizer.json`.

    Args:
        checkpoint: The checkpoint.
        directory: Scratch directory, which must outlive the checkpoint that is returned.
        forkserver: Where the process comes from.
        limits: What the process may take; None for what loading a tokenizer may take in a runtime.

    Returns:
        The checkpoint, with the new file among its tokenizer's, and warnings.

    Raises:
        CheckpointInvalid: The tokenizer is no such thing, of a kind that cannot be converted, or reaches a limit.
        TextProcessLost: The process ended by itself.
    """
    source = find_source(checkpoint)
    if source is None:
        return checkpoint, ()
    # transformers would read more of the checkpoint's directory than has been checked.
    staged = directory / "tokenizer"
    staged.mkdir()
    for file in (checkpoint.path / "config.json", *checkpoint.tokenizer_files):
        (staged / file.name).symlink_to(file.resolve())
    classes = find_family(checkpoint.config).tokenizer_classes
    try:
        answer = asyncio.run(_convert(source, staged, classes, forkserver=forkserver, limits=limits or TextLimits()))
    except TextLimitExceeded as error:
        value = f"{error.work} took more than {error.limit}"
        raise CheckpointInvalid(checkpoint.path, ", ".join(source.files), value, _ACCEPTED) from error
    if isinstance(answer, NotConverted):
        raise CheckpointInvalid(checkpoint.path, answer.file, answer.detail, answer.accepted)
    converted = directory / TOKENIZER_FILE
    converted.write_bytes(answer.tokenizer)
    files = sorted((*checkpoint.tokenizer_files, converted), key=lambda file: file.name)
    return replace(checkpoint, tokenizer_files=tuple(files)), answer.warnings


async def _convert(
    source: TokenizerSource,
    directory: Path,
    classes: Sequence[str],
    *,
    forkserver: ForkserverClient,
    limits: TextLimits,
) -> Converted | NotConverted:
    with os.fdopen(os.memfd_create("tokenizer"), "w+b") as answer_file:
        call = Call(_PROCESS, (source.kind, str(directory), ",".join(classes), limits.max_memory_bytes))
        process = _request(forkserver, call, answer_file.fileno())
        exit_code = await _wait(process, limits.load_timeout_s)
        if exit_code is not None and -exit_code in _FAILURES:
            how = signal.Signals(-exit_code).name
            return NotConverted(", ".join(source.files), f"the library that reads it ended with {how}", _ACCEPTED)
        answer_file.seek(0)
        try:
            answer: Answer = msgspec.msgpack.decode(answer_file.read(), type=Answer)
        except msgspec.MsgspecError as error:
            raise TextProcessLost(_WORK, f"exit code {exit_code}") from error
        if isinstance(answer, OutOfMemory):
            raise TextLimitExceeded(_WORK, f"{limits.max_memory_bytes >> 20} MiB of memory")
        return answer


def _request(forkserver: ForkserverClient, call: Call, answer_fd: int) -> ChildProcess:
    confinement = msgspec.structs.replace(TEXT, file_size_bytes=_MAX_ANSWER_BYTES)
    # Panics of libraries quote what they read.
    with Path(os.devnull).open("wb") as nowhere:
        return forkserver.start(
            call, [answer_fd], name="kiln-text", stderr_fd=nowhere.fileno(), confinement=confinement
        )


async def _wait(process: ChildProcess, timeout_s: float) -> int | None:
    """Waits for the end of a process, which it brings about at a limit of time.

    Raises:
        TextLimitExceeded: The process has taken as much processor time as it may.
        TextProcessLost: It was stopped, or got no processor.
    """
    loop = asyncio.get_running_loop()
    begun_s: float | None = None
    error: TextLimitExceeded | TextProcessLost | None = None

    def look() -> None:
        nonlocal begun_s, error
        # The forkserver may have to load first.
        if process.pid is None:
            return
        begun_s = loop.time() if begun_s is None else begun_s
        if read_cpu_s(process.pid) > timeout_s:
            error = TextLimitExceeded(_WORK, f"{timeout_s:g} s of processor time")
        elif loop.time() - begun_s > CLOCK_FACTOR * timeout_s:
            error = TextProcessLost(_WORK, f"no answer for {CLOCK_FACTOR * timeout_s:g} s")
        else:
            return
        process.kill()

    watch = Watch(timeout_s / _LOOKS, look)
    try:
        exit_code = await process.wait()
    finally:
        watch.stop()
        await asyncio.shield(process.end())
    if error is not None:
        raise error
    return exit_code
