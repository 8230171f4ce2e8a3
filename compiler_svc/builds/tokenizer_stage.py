"""The stage that gives a checkpoint a `tokenizer.json`, which is the only form that runtimes read."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from bundle.errors import KilnError
from bundle.host.confinement import TEXT
from compiler_svc.builds.tokenizer_converter import Answer, Conversion, Converted, NotConverted, OutOfMemory
from compiler_svc.models.registry import find_family
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.tokenizer_sources import TOKENIZER_FILE, TokenizerSource, find_source
from execution.failure import name_cause
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import ForkserverClient
from execution.forkserver.protocol import Call
from execution.forkserver.task import decode, encode, run_task
from execution.text.errors import TextLimitExceeded, TextProcessLost
from execution.text.handle import TextLimits, limiting_time

_PROCESS: Final = "compiler_svc.builds.tokenizer_converter:convert_files"
#: What errors of limits say that the process was doing.
_WORK: Final = "converting the tokenizer"
_MAX_ANSWER_BYTES: Final = 1 << 28
_ACCEPTED: Final = f"what converts within the limits of a text process, or a {TOKENIZER_FILE} beside it"
#: How libraries end a process: by what they were given, or for want of memory.
_FAILURES: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def convert_tokenizer(
    checkpoint: Checkpoint, directory: Path, forkserver: ForkserverClient, limits: TextLimits | None = None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Converts a checkpoint's tokenizer, if it has one, and none in the form of `tokenizer.json`.

    Returns the checkpoint, with the new file among its tokenizer's, and warnings. The scratch directory must outlive
    the checkpoint. None for `limits` is what loading a tokenizer may take in a runtime.
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
    conversion = Conversion(kind=source.kind, directory=staged, classes=classes)
    limits = limits or TextLimits()
    try:
        # Panics of libraries quote what they read.
        with Path(os.devnull).open("wb") as nowhere:
            answer = asyncio.run(_convert(conversion, source, forkserver, limits, stderr_fd=nowhere.fileno()))
    except TextLimitExceeded as error:
        raise CheckpointInvalid(checkpoint.path, ", ".join(source.files), str(error), _ACCEPTED) from error
    if isinstance(answer, NotConverted):
        raise CheckpointInvalid(checkpoint.path, answer.file, answer.detail, answer.accepted)
    converted = directory / TOKENIZER_FILE
    converted.write_bytes(answer.tokenizer)
    files = sorted((*checkpoint.tokenizer_files, converted), key=lambda file: file.name)
    return replace(checkpoint, tokenizer_files=tuple(files)), answer.warnings


async def _convert(
    conversion: Conversion, source: TokenizerSource, forkserver: ForkserverClient, limits: TextLimits, *, stderr_fd: int
) -> Converted | NotConverted:
    ending = await run_task(
        forkserver,
        Call(_PROCESS, (limits.max_memory_bytes,)),
        encode(conversion),
        name="kiln-text",
        confinement=msgspec.structs.replace(TEXT, file_size_bytes=_MAX_ANSWER_BYTES),
        stderr_fd=stderr_fd,
        watching=partial(_limiting_time, timeout_s=limits.load_timeout_s),
    )
    cause = name_cause(ending.exit_code)
    if ending.exit_code is not None and -ending.exit_code in _FAILURES:
        return NotConverted(", ".join(source.files), f"the library that reads it ended with {cause}", _ACCEPTED)
    try:
        # Strangers' files may have taken the process over: it gives no errors of ours a name.
        answer: Answer = decode(b"" if ending.is_failure else ending.answer or b"", Answer)  # type: ignore[arg-type]
    except msgspec.MsgspecError as error:
        raise TextProcessLost(_WORK, cause) from error
    if isinstance(answer, OutOfMemory):
        raise TextLimitExceeded(_WORK, f"{limits.max_memory_bytes >> 20} MiB of memory")
    return answer


@asynccontextmanager
async def _limiting_time(process: ChildProcess, timeout_s: float) -> AsyncIterator[None]:
    errors: list[KilnError] = []

    def end(error: KilnError) -> None:
        errors.append(error)
        process.kill()

    with limiting_time(process, _WORK, timeout_s, end, since_fork=True):
        yield
    if errors:
        raise errors[0]
