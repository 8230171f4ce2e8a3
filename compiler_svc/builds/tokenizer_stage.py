"""The stage that gives a checkpoint the `tokenizer.json`, and the special tokens, that transformers makes of its files.

Runtimes read these alone, as the files have them.
"""

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
from bundle.manifest import Tokens
from compiler_svc.builds.text_stage import describe_text
from compiler_svc.builds.tokenizer_orders import Answer, Comparison, Conversion, Made, NotMade, Order, OutOfMemory
from compiler_svc.models.registry import find_family
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.tokenizer_sources import (
    GGUF,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    find_source,
    has_tokenizer_file,
)
from execution.failure import name_cause
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import ForkserverClient
from execution.forkserver.protocol import Call
from execution.forkserver.task import decode, encode, run_task
from execution.text.errors import TextLimitExceeded, TextProcessLost
from execution.text.handle import TextLimits, limiting_time

_PROCESS: Final = "compiler_svc.builds.tokenizer_converter:answer_order"
_MAX_ANSWER_BYTES: Final = 1 << 28
_ACCEPTED: Final = f"what converts within the limits of a text process, or a {TOKENIZER_FILE} beside it"
#: How libraries end a process: by what they were given, or for want of memory.
_FAILURES: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_MADE_FILES: Final = frozenset((TOKENIZER_FILE, TOKENIZER_CONFIG))


class _LibraryFailed(Exception):
    """How a library ended the process that it ran in."""


def convert_tokenizer(
    checkpoint: Checkpoint,
    tokens: Tokens,
    directory: Path,
    forkserver: ForkserverClient,
    limits: TextLimits | None = None,
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Converts a checkpoint's tokenizer, if it has one, and none in the form of `tokenizer.json`.

    Returns the checkpoint, with the new files among its tokenizer's, and warnings. The scratch directory must outlive
    the checkpoint. None for `limits` is what loading a tokenizer may take in a runtime.
    """
    source = find_source(checkpoint)
    if source is None:
        return checkpoint, ()
    order = Conversion(
        directory=_stage(checkpoint, directory / "converted"),
        load=describe_text(checkpoint, tokens),
        vocab_size=tokens.vocab_size,
        kind=source.kind,
        classes=find_family(checkpoint.config).tokenizer_classes,
    )
    subject = ", ".join(source.files)
    try:
        answer = _run(order, "converting the tokenizer", forkserver, limits)
    except TextLimitExceeded as error:
        raise CheckpointInvalid(checkpoint.path, subject, str(error), _ACCEPTED) from error
    except _LibraryFailed as error:
        detail = f"the library that reads it ended with {error}"
        raise CheckpointInvalid(checkpoint.path, subject, detail, _ACCEPTED) from error
    return _take(checkpoint, answer, directory)


def follow_transformers(
    checkpoint: Checkpoint,
    tokens: Tokens,
    directory: Path,
    forkserver: ForkserverClient,
    limits: TextLimits | None = None,
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Compares what a runtime reads from a checkpoint's `tokenizer.json`, if it has one, with what transformers makes.

    Returns the checkpoint with files that a runtime reads as transformers does, if its own are not such, and warnings.
    """
    if not has_tokenizer_file(checkpoint):
        return checkpoint, ()
    order = Comparison(
        directory=_stage(checkpoint, directory / "compared"),
        load=describe_text(checkpoint, tokens),
        vocab_size=tokens.vocab_size,
    )
    try:
        answer = _run(order, "comparing the tokenizer with that of transformers", forkserver, limits)
    except (TextLimitExceeded, _LibraryFailed) as error:
        return checkpoint, (f"{TOKENIZER_FILE}: not compared with what transformers makes of it ({error})",)
    return _take(checkpoint, answer, directory)


def _stage(checkpoint: Checkpoint, staged: Path) -> Path:
    """Links the files in a folder: transformers would read more of the checkpoint's directory than has been checked."""
    staged.mkdir()
    for file in (*checkpoint.config_files, *checkpoint.tokenizer_files):
        name = GGUF.files[0] if file == checkpoint.path else file.name
        (staged / name).symlink_to(file.resolve())
    return staged


def _take(checkpoint: Checkpoint, answer: Made | NotMade, directory: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    if isinstance(answer, NotMade):
        raise CheckpointInvalid(checkpoint.path, answer.file, answer.detail, answer.accepted)
    if not answer.files:
        return checkpoint, answer.warnings
    # The runtime reads nothing of a GGUF file.
    files = {file.name: file for file in checkpoint.tokenizer_files if file != checkpoint.path}
    for name in _MADE_FILES & answer.files.keys():
        files[name] = directory / name
        files[name].write_bytes(answer.files[name])
    return replace(checkpoint, tokenizer_files=tuple(files[name] for name in sorted(files))), answer.warnings


def _run(order: Order, work: str, forkserver: ForkserverClient, limits: TextLimits | None) -> Made | NotMade:
    # Panics of libraries quote what they read.
    with Path(os.devnull).open("wb") as nowhere:
        return asyncio.run(_ask(order, work, forkserver, limits or TextLimits(), stderr_fd=nowhere.fileno()))


async def _ask(
    order: Order, work: str, forkserver: ForkserverClient, limits: TextLimits, *, stderr_fd: int
) -> Made | NotMade:
    ending = await run_task(
        forkserver,
        Call(_PROCESS, (limits.max_memory_bytes,)),
        encode(order),
        name="kiln-text",
        confinement=msgspec.structs.replace(TEXT, file_size_bytes=_MAX_ANSWER_BYTES),
        stderr_fd=stderr_fd,
        watching=partial(_limiting_time, work=work, timeout_s=limits.load_timeout_s),
    )
    cause = name_cause(ending.exit_code)
    if ending.exit_code is not None and -ending.exit_code in _FAILURES:
        raise _LibraryFailed(cause)
    try:
        # Strangers' files may have taken the process over: it gives no errors of ours a name.
        answer: Answer = decode(b"" if ending.is_failure else ending.answer or b"", Answer)  # type: ignore[arg-type]
    except msgspec.MsgspecError as error:
        raise TextProcessLost(work, cause) from error
    if isinstance(answer, OutOfMemory):
        raise TextLimitExceeded(work, f"{limits.max_memory_bytes >> 20} MiB of memory")
    return answer


@asynccontextmanager
async def _limiting_time(process: ChildProcess, work: str, timeout_s: float) -> AsyncIterator[None]:
    errors: list[KilnError] = []

    def end(error: KilnError) -> None:
        errors.append(error)
        process.kill()

    with limiting_time(process, work, timeout_s, end, since_fork=True):
        yield
    if errors:
        raise errors[0]
