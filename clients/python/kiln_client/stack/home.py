"""The home directory of a stack: which process serves it, and at which addresses.

The process that serves a home holds two locks. `HOME/lock` refuses a second one. `HOME/services.json` says where the
services listen; it counts only while it is locked, so a process that was killed leaves nothing behind that looks alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypedDict

from kiln_client.endpoint import TlsOptions, is_local
from kiln_client.errors import FailedPrecondition, HomeMissing, HomeUnreadable

HOME_VARIABLE: Final = "KILN_HOME"
#: The home of `kiln up` if it gets none, in the directory where it is started.
UP_HOME: Final = Path(".kiln")

_RECORD: Final = "services.json"
_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Connection(TypedDict):
    """Options of a client of the services of a home."""

    tls: TlsOptions | None
    token: Path | None


@dataclass(frozen=True, slots=True)
class StackRecord:
    """What a process that serves a home says of itself. A `host:port` is where this host reaches a service.

    Attributes:
        pid: Process that stops the services when it gets SIGTERM.
        model_roots: Directories from which the compiler reads checkpoints, without links.
        is_detached: Whether `kiln run` started the services in the background.
        tls: Options with which this host's clients reach the services; None if they serve in plaintext.
        token_path: File of the token with which they reach them; None if the services know no key.
    """

    pid: int
    compiler: str
    runtime: str
    model_roots: tuple[str, ...]
    is_detached: bool
    tls: TlsOptions | None = None
    token_path: Path | None = None

    @property
    def connection(self) -> Connection:
        """Options with which this host's clients reach the services."""
        return {"tls": self.tls, "token": self.token_path}

    def listens(self, address: str) -> bool:
        """Whether one of the services listens at an address. One loopback address stands for all of a port."""
        return any(
            address == own or (is_local(own) and is_local(address) and _port_of(own) == _port_of(address))
            for own in (self.compiler, self.runtime)
        )

    def reads(self, path: Path) -> bool:
        """Whether the compiler may read a directory, whose path has no links."""
        return any(path.is_relative_to(root) for root in self.model_roots)


def make_home(home: Path) -> None:
    """Makes a home that only its owner may enter, or takes one that exists from the others."""
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    mode = stat.S_IMODE(home.stat().st_mode)
    if mode & _OF_OTHERS:
        try:
            home.chmod(mode & ~_OF_OTHERS)
        except PermissionError:
            raise FailedPrecondition(
                f"other users may enter {home}, which would hold keys and prompts, and this user may not change that:"
                " choose another --home, or let its owner run `chmod go=` on it",
                reason="HOME_NOT_PRIVATE",
                metadata={"home": home},
            ) from None


def open_private(path: str, flags: int) -> int:
    """Opens a file of a home, as an `opener` of `open` does, so that only its owner may read and write it."""
    fd = os.open(path, flags | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
    with contextlib.suppress(PermissionError):  # another user's, who has opened it to this one
        os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR)
    return fd


def default_home() -> Path:
    """The home of commands that get none: `$XDG_DATA_HOME/kiln`."""
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    if given.is_absolute():  # the XDG specification ignores relative paths
        return given / "kiln"
    try:
        return Path.home() / ".local" / "share" / "kiln"
    except RuntimeError:  # neither HOME nor the system's list of users has one
        raise HomeMissing from None


@contextlib.contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """Makes this process the one that serves a home, until the block ends."""
    with (home / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(
                f"another process serves {home}: end it with `kiln down --home {home}`, or choose another --home",
                reason="HOME_IN_USE",
                metadata={"home": home},
            ) from None
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
    """Reads where the services of a home listen; None if no process serves it, or its services are still starting.

    Raises:
        HomeUnreadable: The file that says it cannot be read, or says something else.
    """
    path = home / _RECORD
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read()
            else:
                return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise HomeUnreadable(path, error.strerror or str(error)) from error
    if not text.endswith(b"}"):  # the process is about to write it, or to end
        return None
    try:
        fields = json.loads(text)
        tls: dict[str, str | None] | None = fields.pop("tls")
        # Services of a release without tokens, which still run, have none.
        given = {"model_roots": tuple(fields["model_roots"]), "token_path": _path_of(fields.get("token_path"))}
        return StackRecord(**fields | given, tls=None if tls is None else _read_tls(tls))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise HomeUnreadable(path, f"it is no record of services ({error!r})") from error


def find_services() -> StackRecord | None:
    """Finds the services of a caller who names none: those of the first known home that run; None if none do."""
    return next((record for home in known_homes() if (record := read_record(home)) is not None), None)


def find_token_path(address: str) -> Path | None:
    """Finds the file of the token for an address: that of the home whose services listen there; None if none does.

    The address is known: a home that cannot be read counts as one without services.
    """
    for home in known_homes():
        with contextlib.suppress(HomeUnreadable):
            if (record := read_record(home)) is not None and record.listens(address):
                return record.token_path
    return None


def known_homes() -> tuple[Path, ...]:
    """Where services are looked for: in the home of KILN_HOME alone; without that variable in two.

    They are `.kiln` in the current directory, if that is this user's own, and the default home, if the user has one.
    """
    given = os.environ.get(HOME_VARIABLE)
    if given:
        return (Path(given),)
    # Another user could leave a record in a directory that all may write to, and so choose a file to be sent.
    homes: tuple[Path, ...] = ()
    with contextlib.suppress(OSError):
        if UP_HOME.stat().st_uid == os.geteuid():
            homes = (UP_HOME,)
    with contextlib.suppress(HomeMissing):
        homes = (*homes, default_home())
    return homes


def _port_of(address: str) -> str:
    return address.rpartition(":")[2]


def _read_tls(fields: Mapping[str, str | None]) -> TlsOptions:
    return TlsOptions(
        _path_of(fields["ca_path"]),
        _path_of(fields["certificate_path"]),
        _path_of(fields["key_path"]),
        fields["server_name"],
    )


def _path_of(text: str | None) -> Path | None:
    return None if text is None else Path(text)
