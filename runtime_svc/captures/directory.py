"""The directory of captured inputs, and one capture from its admission to the event that names its file.

Clients cannot choose a path outside the directory, a file is whole or absent, and the work is bounded.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
import structlog

from bundle.errors import KilnError, ResourcesShort
from bundle.host.file_modes import make_private_directory
from bundle.host.shortage import name_shortage, outlast_shortages
from edge.supervision import begin_task
from runtime_svc.captures.capture_file import render_capture
from runtime_svc.engine.capture import InputCapture
from runtime_svc.engine.events import Event, Finished
from runtime_svc.engine.streams import MergedStream, OutputStream
from runtime_svc.errors import CaptureUnwritable, TooManyCaptures

#: How many requests may capture at once, from admission until the file is written.
MAX_CAPTURES: Final = 16
RETRY_AFTER_S: Final = 1.0
#: Seconds between the tries of a write while the host is short of something: the end of a stream waits for it.
WRITE_DELAYS_S: Final = (0.05, 0.2)

SUFFIX: Final = ".safetensors"
_UNFINISHED: Final = ".partial"
# File systems take names of 255 bytes.
_MAX_NAME_CHARS: Final = 200

_log = structlog.get_logger("captures")


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """The path of the written file, or the error that prevented it."""

    path: Path | None = None
    error: KilnError | None = None


class CaptureDirectory:
    """The directory of captures. Files are `DEPLOYMENT/REQUEST.safetensors`, readable by their owner only."""

    def __init__(self, root: Path) -> None:
        """Removes a killed runtime's unfinished files from `root`, an absolute path; the first capture makes it."""
        self._root = root
        _sweep_unfinished(root)
        # One write at a time, so that a later request with the same id replaces the file of an earlier one.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="captures")
        self._num_open = 0
        self._tasks: set[asyncio.Task[CaptureOutcome]] = set()

    async def begin(
        self, inputs: InputCapture, *, deployment_id: str, bundle: str, request_id: str, owner: str = ""
    ) -> PendingCapture:
        """Reserves a capture and checks that its file can be written, before the request computes a step.

        Clients choose any `request_id`, see `file_name`. No file replaces one of another `owner`, see `Principal.key`.
        """
        if self._num_open >= MAX_CAPTURES:
            raise TooManyCaptures(MAX_CAPTURES, RETRY_AFTER_S)
        path = (
            self._root
            / file_name(deployment_id)
            / (file_name(f"{owner}\n{request_id}" if owner else request_id) + SUFFIX)
        )
        self._num_open += 1
        try:
            await outlast_shortages(lambda: self._run(_probe, path.parent), WRITE_DELAYS_S)
        except OSError as error:
            self._num_open -= 1
            raise CaptureUnwritable(path.parent.name, _describe(error)) from error
        except BaseException:
            self._num_open -= 1
            raise
        return PendingCapture(self, inputs, path, deployment_id, bundle, request_id)

    def start(self, pending: PendingCapture) -> asyncio.Task[CaptureOutcome]:
        """Starts to write a capture; see `PendingCapture.write`."""
        return begin_task(self._write(pending), self._tasks)

    def release(self) -> None:
        """Gives back the capture that `begin` reserved."""
        self._num_open -= 1

    async def close(self) -> None:
        """Waits until every file that is being written is complete."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._disk.shutdown()

    async def _write(self, pending: PendingCapture) -> CaptureOutcome:
        try:
            # Rendered for each try, because the pieces can be taken once.
            await outlast_shortages(lambda: self._run(_write_whole, pending.path, pending.render()), WRITE_DELAYS_S)
        except (OSError, ResourcesShort) as error:
            place = f"{pending.path.parent.name}/{pending.path.name}"
            failure = name_shortage(error) or CaptureUnwritable(place, _describe(error))
            _log.warning("captured inputs are lost", request_id=pending.request_id, error=str(failure))
            return CaptureOutcome(error=failure)
        finally:
            self.release()
        return CaptureOutcome(path=pending.path)

    async def _run(self, function: object, *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)  # type: ignore[arg-type]


@dataclass(eq=False, slots=True)
class PendingCapture:
    """One capture from its admission to its file. The caller ends it with `write` or `cancel`."""

    directory: CaptureDirectory
    inputs: InputCapture
    path: Path
    deployment_id: str
    bundle: str
    request_id: str
    _task: asyncio.Task[CaptureOutcome] | None = None

    def render(self) -> Iterable[bytes]:
        """Returns the file's bytes in pieces."""
        return render_capture(
            self.inputs, deployment_id=self.deployment_id, bundle=self.bundle, request_id=self.request_id
        )

    def cancel(self) -> None:
        """Gives the capture up before a step has run; no file is written."""
        assert self._task is None, "it is being written"
        self.directory.release()

    def write(self) -> asyncio.Task[CaptureOutcome]:
        """Writes the file in a thread, once the request has ended. Later calls return the same task.

        The task ends with an outcome, never with an error, and goes on if no caller waits for it.
        """
        if self._task is None:
            self._task = self.directory.start(self)
        return self._task


class CapturingStream:
    """An `OutputStream` whose terminal event waits for the file of captured inputs, and names it or the error."""

    def __init__(self, stream: OutputStream | MergedStream, pending: PendingCapture) -> None:
        self._stream = stream
        self._pending = pending

    @property
    def ends(self) -> Sequence[Finished]:
        """See `OutputStream`."""
        return self._stream.ends

    @property
    def error(self) -> KilnError | None:
        """See `OutputStream`."""
        return self._stream.error

    @property
    def stall_timeout_s(self) -> float | None:
        """See `OutputStream`."""
        return self._stream.stall_timeout_s

    def close(self) -> None:
        """Ends the request unless it has ended, and writes its capture. The consumer calls it when it leaves."""
        self._stream.close()
        self._pending.write()

    def __aiter__(self) -> CapturingStream:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._stream)
        if not isinstance(event.payload, Finished):
            return event
        # The file is written even if the consumer leaves meanwhile.
        outcome = await asyncio.shield(self._pending.write())
        payload = msgspec.structs.replace(
            event.payload,
            captured_inputs_path="" if outcome.path is None else str(outcome.path),
            capture_error=outcome.error,
        )
        return msgspec.structs.replace(event, payload=payload)


def file_name(client_text: str) -> str:
    """Returns the file name of an id: the percent-encoded id, so that no id leads out of its directory.

    Different ids have different names. A name that would be too long is cut and ends in `+` and the id's SHA-256. No
    name begins with a dot.
    """
    encoded = quote(client_text, safe="")
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if len(encoded) <= _MAX_NAME_CHARS:
        return encoded
    digest = sha256(client_text.encode()).hexdigest()
    return f"{encoded[: _MAX_NAME_CHARS - len(digest) - 1]}+{digest}"


def _probe(directory: Path) -> None:
    for path in (directory.parent, directory):
        make_private_directory(path)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"\0")


def _write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=_UNFINISHED)
    partial = Path(name)
    # Tells a sweep that the writer is alive.
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(pieces)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _sweep_unfinished(root: Path) -> None:
    """Removes the files that no living writer holds locked, as far as the disk lets it."""
    for path in root.glob(f"*/.*{_UNFINISHED}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _describe(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
