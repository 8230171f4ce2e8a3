"""A container engine of this test's own: Debian's, with its data in a scratch directory and no registry to pull from.

Images get their base from Debian's packages, and pip its wheels from a folder that the host's pip has filled.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.hang_guard import HANG_S
from tests.repository import ROOT
from tests.service.deploy.compose_file import ENVIRONMENT
from tests.tools import require_tool

#: In order of preference; the second one copies, and works everywhere.
STORAGE_DRIVERS = ("overlay2", "vfs")
BASE_PACKAGES = ("python3.11", "python3.11-venv", "python3-pip", "python-is-python3", "ca-certificates")
BASE = "kiln-test-python"
BUILD_TIMEOUT_S = 900
#: Distributions of ours that the images install.
FOLDERS = ("protos", "bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc")


class Engine:
    """A running engine.

    Attributes:
        environment: What its clients need.
        wheels_url: Where the wheels are.
    """

    def __init__(self, socket_path: Path, wheels_url: str) -> None:
        self.environment = {**ENVIRONMENT, "DOCKER_HOST": f"unix://{socket_path}", "DOCKER_BUILDKIT": "1"}
        self.wheels_url = wheels_url
        self._client = require_tool("bin/docker")

    def run(self, *words: str, input_text: str | None = None, timeout_s: float = HANG_S) -> str:
        """Runs a command of the engine's client; gives its output.

        Raises:
            CalledProcessError: It failed; `stderr` says why.
        """
        return run([str(self._client), *words], self.environment, input_text=input_text, timeout_s=timeout_s)

    def build(self, context: Path, dockerfile: str, tag: str, **arguments: str) -> None:
        """Builds an image as Compose would; Compose itself needs buildx, which Debian 12 has not."""
        named = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        where = ["--network", "host", "--file", str(context / dockerfile), "--tag", tag]
        started_s = time.monotonic()
        self.run("build", "--quiet", *where, *named, str(context), timeout_s=BUILD_TIMEOUT_S)
        megabytes = int(self.run("image", "inspect", "--format", "{{.Size}}", tag)) / 1e6
        say(f"{tag}: {megabytes:.0f} MB, built in {time.monotonic() - started_s:.0f} s")


def run(
    command: list[str],
    environment: Mapping[str, str],
    *,
    input_text: str | None = None,
    is_secret: bool = False,
    timeout_s: float = HANG_S,
) -> str:
    """Runs a command, and tells it with what it says, unless that is a secret.

    Raises:
        CalledProcessError: It failed; `stderr` says why.
    """
    say(f"$ {Path(command[0]).name} {shlex.join(command[1:])}")
    result = subprocess.run(
        command, check=False, env=environment, input=input_text, capture_output=True, text=True, timeout=timeout_s
    )
    say("" if is_secret else result.stdout.strip(), result.stderr.strip())
    result.check_returncode()
    return result.stdout.strip()


def say(*lines: str) -> None:
    """Writes lines that are not empty to the test's output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines if line))
    sys.stdout.flush()


@contextmanager
def running_engine(scratch: Path) -> Iterator[Engine]:
    """Starts an engine with a base image; skips where none starts.

    Args:
        scratch: Directory with a short path, as sockets are in it.
    """
    if os.geteuid() != 0:
        pytest.skip("a container engine needs root")
    with starting(scratch) as socket_path, serving_wheels(scratch / "wheels") as url:
        engine = Engine(socket_path, url)
        make_base(engine, scratch / "base.tar")
        yield engine


@contextmanager
def starting(scratch: Path) -> Iterator[Path]:
    """Starts the engine's server with the first storage driver that works; gives its socket."""
    reasons = []
    for driver in STORAGE_DRIVERS:
        place = scratch / driver
        place.mkdir()
        socket_path, log_path = place / "socket", place / "log"
        command = [str(require_tool("sbin/dockerd")), "--iptables=false", "--ip6tables=false", "--bridge=none"]
        command += [f"--data-root={place}/data", f"--exec-root={place}/exec", f"--pidfile={place}/pid"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--host=unix://{socket_path}", f"--storage-driver={driver}"], stdout=log, stderr=log
            )
        try:
            deadline_s = time.monotonic() + HANG_S
            while process.poll() is None and b"API listen on" not in log_path.read_bytes():
                assert time.monotonic() < deadline_s, log_path.read_text()
                time.sleep(0.1)
            if process.poll() is None:
                yield socket_path
                return
            reasons.append(f"{driver}: {log_path.read_text().splitlines()[-1]}")
        finally:
            process.terminate()
            process.wait()
            # A hundred thousand files, with which Python takes minutes.
            subprocess.run(["rm", "--recursive", "--force", str(place)], check=True)
    pytest.skip(f"no container engine starts here: {'; '.join(reasons)}")


def make_base(engine: Engine, archive: Path) -> None:
    """Makes the image that stands for python:3.11-slim-bookworm, which is at a registry."""
    with_packages = f"--include={','.join(BASE_PACKAGES)}"
    command = [str(require_tool("mmdebstrap")), "--quiet", "--variant=minbase", with_packages, "bookworm", str(archive)]
    run(command, os.environ, timeout_s=BUILD_TIMEOUT_S)
    engine.run("import", str(archive), BASE, timeout_s=BUILD_TIMEOUT_S)
    archive.unlink()


@contextmanager
def serving_wheels(folder: Path) -> Iterator[str]:
    """Fills a folder with the wheels that images install, and serves it on loopback, which builds can reach."""
    download_wheels(folder)
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def download_wheels(folder: Path) -> None:
    """Downloads with this host's pip, wherever it looks: torch's CPU build first, so that nothing asks for another."""
    script = (ROOT / "deploy/install-torch").read_text()
    (version,), (index,) = re.findall(r"^version=(\S+)", script, re.M), re.findall(r"TORCH_INDEX:-(\S+)}", script)
    torch = f"torch=={version}+cpu"
    try:
        download(folder, "--no-deps", torch)
    except subprocess.CalledProcessError:
        download(folder, "--no-deps", "--index-url", os.environ.get("TORCH_INDEX", index), torch)
    projects = [tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"] for name in FOLDERS]
    wanted = {word for project in projects for word in project["dependencies"]}
    wanted |= {*projects[-1]["optional-dependencies"]["vllm-engine"], "pip", "setuptools", "smg"}
    ours = re.compile(r"kiln-|torch\b")
    constraints = f"--constraint={ROOT / 'deploy/constraints.txt'}"
    download(folder, constraints, torch, *sorted(word for word in wanted if not ours.match(word)))


def download(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--find-links", str(folder)]
    folder.mkdir(exist_ok=True)
    run([*command, *words], os.environ, timeout_s=BUILD_TIMEOUT_S)


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Says nothing of requests."""
