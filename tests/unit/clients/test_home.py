"""Who serves a home: a record counts while the process that wrote it holds the home."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from kiln_client.endpoint import TlsOptions
from kiln_client.errors import FailedPrecondition
from kiln_client.stack.home import StackRecord, announced, default_home, locked_home, read_record

RECORD = StackRecord(
    pid=os.getpid(), compiler="127.0.0.1:1", runtime="127.0.0.1:2", model_roots=("/models",), is_detached=True
)


def test_a_record_is_there_while_the_services_are(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    with announced(tmp_path, RECORD):
        assert read_record(tmp_path) == RECORD
    assert read_record(tmp_path) is None


def test_a_record_keeps_the_options_of_tls(tmp_path: Path) -> None:
    tls = TlsOptions(Path("/ca.pem"), Path("/certificate.pem"), Path("/key.pem"))
    for options in (tls, TlsOptions(Path("/ca.pem"))):
        record = StackRecord(1, "127.0.0.1:1", "127.0.0.1:2", (), is_detached=False, tls=options)
        with announced(tmp_path, record):
            assert read_record(tmp_path) == record


def test_a_record_keeps_the_place_of_the_token(tmp_path: Path) -> None:
    record = replace(RECORD, token_path=tmp_path / "auth" / "token")
    with announced(tmp_path, record):
        assert read_record(tmp_path) == record
        assert record.connection == {"tls": None, "token": tmp_path / "auth" / "token"}
    with announced(tmp_path, RECORD):
        path = tmp_path / "services.json"
        fields = json.loads(path.read_text())
        del fields["token_path"]  # as releases without tokens wrote it
        path.write_text(json.dumps(fields))
        assert read_record(tmp_path) == RECORD


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        *((f"{host}:2", True) for host in ("127.0.0.1", "localhost", "[::1]", "dns:///localhost")),
        *((address, False) for address in ("127.0.0.1:3", "10.0.0.1:2", "localhost.example:2", "unix:/run/kiln:4")),
    ],
)
def test_services_listen_at_every_loopback_name_of_their_ports(address: str, is_own: bool) -> None:
    assert RECORD.listens(address) is is_own


def test_services_beyond_loopback_listen_at_their_addresses() -> None:
    record = replace(RECORD, runtime="10.0.0.1:2")
    assert record.listens("10.0.0.1:2")
    assert not record.listens("127.0.0.1:2")


def test_what_a_killed_process_left_is_no_record(tmp_path: Path) -> None:
    with announced(tmp_path, RECORD):
        left = (tmp_path / "services.json").read_bytes()
    (tmp_path / "services.json").write_bytes(left)  # the kernel has released the lock
    assert read_record(tmp_path) is None


def test_a_record_that_is_being_written_is_none(tmp_path: Path) -> None:
    with (tmp_path / "services.json").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_record(tmp_path) is None
        file.write(b'{"pid": 1')
        file.flush()
        assert read_record(tmp_path) is None


def test_one_process_serves_a_home(tmp_path: Path) -> None:
    with (
        locked_home(tmp_path),
        pytest.raises(FailedPrecondition, match="another process serves"),
        locked_home(tmp_path),
    ):
        pass
    with locked_home(tmp_path):
        pass


@pytest.mark.parametrize(
    ("path", "is_read"), [("/models", True), ("/models/llama", True), ("/models-2", False), ("/", False)]
)
def test_a_compiler_reads_what_is_below_its_roots(path: str, is_read: bool) -> None:
    assert RECORD.reads(Path(path)) is is_read


def test_the_default_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_home() == Path("/data/kiln")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_home() == Path("/home/ada/.local/share/kiln")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_home() == Path("/home/ada/.local/share/kiln")
