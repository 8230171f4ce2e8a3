"""The TypeScript client: its checks, its unit tests, and its tests and example against the real services.

The packages are installed from the lock file once, and again when the lock file changes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hang_guard import HANG_S
from tests.repository import ROOT
from tests.servers.certificates import make_certificate
from tests.servers.stack import Stack
from tests.tools import require_tool

CLIENT = ROOT / "clients/typescript"


@pytest.fixture(scope="module", autouse=True)
def node() -> None:
    """Every test here needs npm, and Node in a version that the client supports."""
    engines = json.loads((CLIENT / "package.json").read_text())["engines"]
    require_tool("node", oldest=engines["node"].removeprefix(">="))
    require_tool("npm")


@pytest.fixture(scope="module")
def packages(node: None) -> None:
    """What package-lock.json names, in node_modules."""
    run("npm", "run", "setup")


@pytest.fixture(scope="module")
def built(packages: None) -> None:
    """The client, its tests and its example as JavaScript."""
    run("npm", "run", "build")


def run(*command: str, **variables: str) -> None:
    """Runs a command in the client's folder; shows what it printed if it fails."""
    result = subprocess.run(
        command,
        cwd=CLIENT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}"


def test_messages_are_generated_from_the_protos_and_sources_pass_their_checks(packages: None) -> None:
    run("npm", "run", "check", BUF=str(Path(sys.executable).with_name("buf")))


def test_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (CLIENT / "package-lock.json").read_text()


def test_units(built: None, tmp_path: Path) -> None:
    for name in ("server", "client"):
        make_certificate(tmp_path, name)
    run("npm", "run", "test:units", KILN_TEST_CERTIFICATES=str(tmp_path))


def test_against_real_services(built: None, stack: Stack) -> None:
    run("npm", "run", "test:services", KILN_COMPILER=stack.compiler, KILN_RUNTIME=stack.runtime)


def test_example_streams_until_it_is_interrupted(built: None, stack: Stack) -> None:
    for _ in range(10):
        returncode, text, rest, messages = interrupt_example(stack)
        # A stream that was over before the interrupt came proves nothing.
        if returncode:
            break
    assert text.strip()
    assert len(rest) < 400, "the stream was over before the interrupt: the check proves nothing"
    assert returncode == 130, messages
    assert messages.endswith("interrupted\n")
    assert stack.kiln("status").last["deployments"] == []


def interrupt_example(stack: Stack) -> tuple[int, str, str, str]:
    """Exit code of the example, its first text, the text that followed the interrupt, and its messages."""
    environment = os.environ | {"KILN_COMPILER": stack.compiler, "KILN_RUNTIME": stack.runtime}
    with subprocess.Popen(
        ["node", "dist/examples/generate.js", "Once upon a time"],
        cwd=CLIENT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as example:
        assert example.stdout is not None
        text = example.stdout.read(5)
        example.send_signal(signal.SIGINT)
        rest, messages = example.communicate(timeout=HANG_S)
    return example.returncode, text, rest, messages
