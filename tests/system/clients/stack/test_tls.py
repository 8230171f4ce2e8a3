"""`kiln up` over TLS."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from kiln_client.cli.main import main

from tests.servers.authority import Authority
from tests.system.clients.stack.conftest import Up

Start = Callable[..., Up]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "certificates"
    folder.mkdir()
    authority = Authority(folder)
    certificate, key = authority.issue("server")
    return {"--tls-cert": certificate, "--tls-key": key, "--tls-ca": authority.path}


def words(options: dict[str, Path]) -> list[object]:
    return [word for option in options.items() for word in option]


def options_of(running: Up, service: str) -> dict[str, str]:
    """The options that a service was started with, each of which has one value."""
    arguments = running.service(service)["arguments"]
    return {name: value for name, value in itertools.pairwise(arguments) if name.startswith("--")}


def test_both_services_serve_tls_and_are_asked_over_it(up: Start, files: dict[str, Path]) -> None:
    running = up(*words(files))
    assert running.read()["event"] == "ready"
    server = {"--tls-certificate": str(files["--tls-cert"]), "--tls-key": str(files["--tls-key"])}
    assert options_of(running, "compiler").items() >= server.items()
    runtime = options_of(running, "runtime")
    assert runtime.items() >= {**server, "--compiler-ca": str(files["--tls-ca"])}.items()
    assert "--compiler-certificate" not in runtime


def test_mutual_tls(up: Start, files: dict[str, Path]) -> None:
    running = up(*words(files), "--tls-client-ca", files["--tls-ca"])
    assert running.read()["event"] == "ready"
    client_ca = {"--tls-client-ca": str(files["--tls-ca"])}
    assert options_of(running, "compiler").items() >= client_ca.items()
    shown = {"--compiler-certificate": str(files["--tls-cert"]), "--compiler-key": str(files["--tls-key"])}
    assert options_of(running, "runtime").items() >= {**client_ca, **shown}.items()


def test_every_address_is_reached_over_loopback(up: Start, files: dict[str, Path]) -> None:
    running = up(*words(files), "--compiler-address", "0.0.0.0:0")
    ready = running.read()
    assert ready["compiler"].startswith("0.0.0.0:")
    assert options_of(running, "runtime")["--compiler"] == ready["compiler"].replace("0.0.0.0", "127.0.0.1")


def test_a_certificate_of_somebody_else_is_not_trusted(up: Start, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    running = up(*words(files | {"--tls-ca": Authority(tmp_path / "other").path}), "--ready-timeout", 2)
    assert running.fail()["reason"] == "SERVICE_NOT_READY"


@pytest.mark.parametrize("missing", ["--tls-cert", "--tls-key", "--tls-ca"])
def test_half_of_tls_is_refused(files: dict[str, Path], missing: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = {name: path for name, path in files.items() if name != missing}
    assert main(["up", *map(str, words(given))]) == 2
    assert "--tls-cert, --tls-key and --tls-ca belong together" in capfd.readouterr().err


def test_client_authorities_need_a_certificate(files: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--tls-client-ca", str(files["--tls-ca"])]) == 2
    assert "--tls-client-ca needs them" in capfd.readouterr().err
