"""The home directory of a stack: which process serves it, and at which addresses.

The process that serves a home holds two locks. `HOME/lock` refuses a second one. `HOME/services.json` says where the
services listen; it counts only while it is locked, so a process that was killed leaves nothing behind that looks alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kiln_client.endpoint import TlsOptions
from kiln_client.errors import HomeInUse

_RECORD: Final = "services.json"


@dataclass(frozen=True, slots=True)
class StackRecord:
    """What a process that serves a home says about itself.

    Attributes:
        pid: Process that stops the services when it gets SIGTERM.
        compiler: `host:port` at which this host reaches the compiler.
        runtime: `host:port` at which this host reaches the runtime.
        model_roots: Directories from which the compiler reads checkpoints, without links.
        is_detached: Whether `kiln run` started the services in the background.
        tls: Options with which this host's clients reach the services; None if they serve in plaintext.
    """

    pid: int
    compiler: str
    runtime: str
    model_roots: tuple[str, ...]
    is_detached: bool
    tls: TlsOptions | None = None

    def reads(self, path: Path) -> bool:
        """Whether the compiler may read a directory, whose path has no links."""
        return any(path.is_relative_to(root) for root in self.model_roots)


def default_home() -> Path:
    """The home of commands that get none: `$XDG_DATA_HOME/kiln`."""
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG specification ignores relative paths.
    return (given if given.is_absolute() else Path.home() / ".local" / "share") / "kiln"


@contextlib.contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """Makes this process the one that serves a home, until the block ends.

    Raises:
        HomeInUse: Another process serves it.
    """
    with (home / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HomeInUse(home) from None
        try:
            yield
        finally:
            # Closing would not do: a child that is being started has the file open until it executes its program.
            fcntl.flock(lock, fcntl.LOCK_UN)


@contextlib.contextmanager
def announced(home: Path, record: StackRecord) -> Iterator[None]:
    """Lets `read_record` find the services of a home, until the block ends. The caller holds `locked_home`."""
    with (home / _RECORD).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for readers, who hold their lock for a moment
        file.truncate(0)
        file.write(json.dumps(asdict(record), default=str).encode())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def read_record(home: Path) -> StackRecord | None:
    """Reads where the services of a home listen; None if no process serves it, or its services are still starting."""
    try:
        with (home / _RECORD).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read()
            else:
                return None
    except FileNotFoundError:
        return None
    if not text.endswith(b"}"):  # the process is about to write it, or to end
        return None
    fields = json.loads(text)
    tls: dict[str, str | None] | None = fields.pop("tls")
    return StackRecord(
        **fields | {"model_roots": tuple(fields["model_roots"])}, tls=None if tls is None else _read_tls(tls)
    )


def _read_tls(fields: Mapping[str, str | None]) -> TlsOptions:
    def path(name: str) -> Path | None:
        text = fields[name]
        return None if text is None else Path(text)

    return TlsOptions(path("ca_path"), path("certificate_path"), path("key_path"), fields["server_name"])
