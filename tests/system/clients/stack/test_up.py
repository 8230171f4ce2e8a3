"""`kiln up`: two services started, watched and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln_client.cli.main import main
from kiln_client.stack import stack
from kiln_client.stack.service_process import Service

from tests.hang_guard import HANG_S
from tests.system.clients.stack.conftest import Up, gone

Start = Callable[..., Up]


def is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def test_ready_means_healthy_at_the_bound_addresses(up: Start, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    running = up("--cores", 3, "--model-root", "a", "--model-root", tmp_path / "b")
    ready = running.read()
    assert ready["event"] == "ready"
    assert not ready["compiler"].endswith(":0")
    assert is_serving(ready["compiler"])
    assert is_serving(ready["runtime"])
    home = running.home
    assert running.service("compiler")["arguments"] == [
        *("--address", "127.0.0.1:0", "--log-file", f"{home}/logs/compiler.log"),
        *("--auth-jwks", f"{home}/auth/jwks.json", "--store", f"{home}/store"),
        *("--database", f"sqlite:///{home}/kiln.db"),
        *("--cache", f"{home}/cache/compiler", "--default-isa", "native", "--model-root", f"{home}/models"),
        *("--model-root", f"{tmp_path}/a", "--model-root", f"{tmp_path}/b"),
    ]
    assert running.service("runtime")["arguments"] == [
        *("--address", "127.0.0.1:0", "--log-file", f"{home}/logs/runtime.log"),
        *("--auth-jwks", f"{home}/auth/jwks.json", "--compiler", ready["compiler"]),
        *("--compiler-token-file", f"{home}/auth/token", "--bundle-store", f"{home}/store"),
        *("--cache", f"{home}/cache/runtime", "--state", f"{home}/state/runtime", "--cores", "3"),
    ]
    folders = {"auth", "models", "store", "state", "state/runtime", "cache", "cache/compiler", "cache/runtime", "logs"}
    assert {str(path.relative_to(home)) for path in home.rglob("*") if path.is_dir()} == folders


def test_options_of_the_services_are_handed_on(up: Start, tmp_path: Path) -> None:
    """From a directory in which `python -m` would find another `runtime_svc` first."""
    (tmp_path / "runtime_svc").mkdir()
    (tmp_path / "runtime_svc/__init__.py").write_text("raise SystemExit('not the service')")
    (tmp_path / "layouts").mkdir()
    (tmp_path / "deployments.yaml").touch()
    running = up(
        *("--threads-per-core", 2, "--memory", "6GiB", "--deployments", "deployments.yaml", "--import-root", "layouts"),
        *("--capture-directory", "captures", "--default-isa", "x86-64-v3"),
    )
    assert running.read()["event"] == "ready"
    compiler = running.service("compiler")["arguments"]
    assert compiler[compiler.index("--default-isa") + 1] == "x86-64-v3"
    assert compiler[-2:] == ["--import-root", f"{tmp_path}/layouts"]
    handed_on = [
        *("--threads-per-core", "2", "--memory", "6GiB", "--deployments", f"{tmp_path}/deployments.yaml"),
        *("--capture-directory", f"{tmp_path}/captures"),
    ]
    assert running.service("runtime")["arguments"][-8:] == handed_on


def test_a_target_with_cores_is_handed_on(up: Start, tmp_path: Path) -> None:
    """The runtime counts the cores if no option says how many to use; the interpreter's link stays one."""
    python = tmp_path / "neuron-python"
    python.symlink_to("/bin/sh")
    running = up("--target", "trn2", "--logical-core-size", 1, "--neuron-python", "neuron-python")
    assert running.read()["event"] == "ready"
    compiler = running.service("compiler")["arguments"]
    assert compiler[compiler.index("--neuron-python") + 1] == "neuron-python"
    arguments = running.service("runtime")["arguments"]
    assert arguments[-4:] == ["--target", "trn2", "--logical-core-size", "1"]
    assert "--cores" not in arguments


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_stop_both_in_good_order(up: Start, number: int) -> None:
    """A terminal signals the foreground process group, in which the services must not be."""
    running = up(compiler={"chatter_bytes": 1_000_000}, runtime={"stutter": 1})
    assert is_serving(running.read()["runtime"])
    pids = [running.pid(name) for name in ("compiler", "runtime")]
    assert [*map(os.getpgid, pids)] == pids
    assert running.end(number) == 0
    assert running.read() == {"event": "stopped"}
    assert all(map(gone, pids))
    assert "stopped in good order" in running.log("compiler")
    assert "stopped in good order" in running.log("runtime")
    assert "a line of the log" in running.log("runtime")
    assert "ready address=" not in running.log("runtime")
    assert len(running.log("compiler")) > 1_000_000


def test_for_a_person(up: Start) -> None:
    running = up(as_json=False)
    assert running.process.stdout is not None
    line = running.process.stdout.readline()
    assert re.fullmatch(r"ready compiler=127\.0\.0\.1:\d+ runtime=127\.0\.0\.1:\d+\n", line)
    assert running.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(("dying", "other"), [("compiler", "runtime"), ("runtime", "compiler")])
def test_a_service_that_dies_stops_the_other(up: Start, dying: str, other: str) -> None:
    running = up()
    running.read()
    other_pid = running.pid(other)
    os.kill(running.pid(dying), signal.SIGKILL)
    error = running.fail()
    assert (error["code"], error["reason"]) == ("UNAVAILABLE", "SERVICE_EXITED")
    assert f"the {dying} service was killed by signal 9" in error["message"]
    assert error["metadata"]["log"] == str(running.home / "logs" / f"{dying}.log")
    assert gone(other_pid)
    assert "stopped in good order" in running.log(other)


@pytest.mark.parametrize("name", ["compiler", "runtime"])
def test_a_service_that_cannot_start_is_named_with_its_last_words(up: Start, name: str) -> None:
    running = up(**{name: {"crash": 3}})
    error = running.fail()
    assert error["metadata"]["returncode"] == "3"
    assert f"the {name} service exited with code 3" in error["message"]
    assert "cannot open the database" in error["message"]
    if name == "runtime":
        assert gone(running.pid("compiler"))


@pytest.mark.parametrize(
    "flaw", ["unhealthy", *(pytest.param(flaw, marks=pytest.mark.slow) for flaw in ("silent", "healthless"))]
)
def test_a_service_that_does_not_become_healthy(up: Start, flaw: str) -> None:
    running = up("--ready-timeout", 6, runtime={flaw: 1})
    error = running.fail()
    assert (error["code"], error["reason"]) == ("UNAVAILABLE", "SERVICE_NOT_READY")
    assert "the runtime service was not ready after 6 s" in error["message"]
    assert gone(running.pid("runtime"))
    assert gone(running.pid("compiler"))


@pytest.mark.parametrize(
    ("dying", "flaw"),
    [
        ("compiler", "silent"),
        *(pytest.param("runtime", flaw, marks=pytest.mark.slow) for flaw in ("silent", "unhealthy")),
        pytest.param("compiler", "unhealthy", marks=pytest.mark.slow),
    ],
)
def test_a_service_that_dies_during_the_start(up: Start, flaw: str, dying: str) -> None:
    running = up(runtime={flaw: 1})
    running.service("runtime")
    time.sleep(0.3)  # long enough for an announcement to be read
    os.kill(running.pid(dying), signal.SIGKILL)
    error = running.fail()
    assert error["reason"] == "SERVICE_EXITED"
    assert f"the {dying} service was killed by signal 9" in error["message"]
    assert gone(running.pid("runtime"))
    assert gone(running.pid("compiler"))


def test_a_signal_while_starting_stops_what_started(up: Start) -> None:
    running = up(runtime={"silent": 1})
    pids = [running.pid(name) for name in ("compiler", "runtime")]
    assert running.end(signal.SIGTERM) == 0
    assert all(map(gone, pids))


def test_what_ignores_sigterm_and_what_a_service_leaves_in_its_group_is_killed(up: Start) -> None:
    running = up("--stop-timeout", 1, runtime={"deaf": 1}, compiler={"litter": 1})
    running.read()
    pid, (litter,) = running.pid("runtime"), running.service("compiler")["litter"]
    assert running.end(signal.SIGTERM) == 0
    assert gone(pid)
    assert gone(litter)
    assert "stopped in good order" not in running.log("runtime")


def test_services_do_not_outlive_a_killed_up(up: Start) -> None:
    running = up(runtime={"deaf": 1})
    running.read()
    pids = [running.pid(name) for name in ("compiler", "runtime")]
    running.process.kill()
    assert all(map(gone, pids))


def test_one_home_is_served_once(up: Start) -> None:
    first = up()
    first.read()
    second = up()
    error = second.fail()
    assert (error["code"], error["reason"]) == ("FAILED_PRECONDITION", "HOME_IN_USE")
    assert str(first.home) in error["message"]
    assert first.end(signal.SIGTERM) == 0
    third = up()
    assert third.read()["event"] == "ready"
    assert third.end(signal.SIGTERM) == 0


def test_service_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(stack, "RUNTIME", Service("runtime", "no_such_module", "kiln-runtime"))
    assert main(["up", "--home", str(tmp_path / "home"), "--json"]) == 1
    error = json.loads(capfd.readouterr().out)["error"]
    assert (error["code"], error["reason"]) == ("FAILED_PRECONDITION", "SERVICE_NOT_INSTALLED")
    assert "install the distribution kiln-runtime" in error["message"]
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("umask", [0o022, 0o000], ids=oct)
def test_a_home_is_its_owners_alone(up: Start, tmp_path: Path, umask: int) -> None:
    """Also one that an earlier release left open."""
    former = os.umask(umask)
    try:
        logs = tmp_path / "home" / "logs"
        logs.mkdir(parents=True)
        (logs / "compiler.log").touch()
        running = up()
        running.read()
    finally:
        os.umask(former)
    assert stat.S_IMODE(running.home.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in logs.iterdir()} == {
        "compiler.log": 0o600,
        "runtime.log": 0o600,
    }
    assert running.end(signal.SIGTERM) == 0


def test_a_home_that_others_may_enter_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "chmod", refuse)
    tmp_path.joinpath("home").mkdir(mode=0o755)
    assert main(["up", "--home", str(tmp_path / "home"), "--json"]) == 1
    error = json.loads(capfd.readouterr().out)["error"]
    assert (error["code"], error["reason"]) == ("FAILED_PRECONDITION", "HOME_NOT_PRIVATE")
    assert list((tmp_path / "home").iterdir()) == []
