"""What a build process makes of an error that ends its build."""

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from bundle.errors import ResourcesShort
from compiler_svc.builds import process
from compiler_svc.builds.job import NO_ROOM_EXIT_CODE, JobDirectory
from compiler_svc.compiles.build_runner import read_result
from compiler_svc.errors import BuildFailed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/secret"), ResourcesShort),
        (OSError(errno.ENOENT, "No such file", "/secret"), BuildFailed),
        (ZeroDivisionError("secret"), BuildFailed),
    ],
)
def test_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(JobDirectory, "read_job", fail)
    ours, theirs = socket.socketpair()
    forkservers: Any = None
    with ours, theirs:
        outcome = process._build(JobDirectory(tmp_path), theirs, forkservers)
    assert outcome.error is not None
    assert type(outcome.error.to_error()) is kind
    assert "secret" not in outcome.error.message


def test_an_outcome_that_finds_no_room(tmp_path: Path) -> None:
    with pytest.raises(ResourcesShort, match="disk space: the build found no room for its outcome"):
        read_result(JobDirectory(tmp_path), NO_ROOM_EXIT_CODE)
