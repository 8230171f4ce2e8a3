"""Ctrl-C in a chat, on a pseudo-terminal: it ends an answer, or a line, and not the chat."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kiln.runtime.v1 import runtime_pb2
from kiln_client.stack.home import StackRecord, announced

from tests.hang_guard import HANG_S
from tests.servers import responses as samples
from tests.servers.command import KILN, python_environment
from tests.servers.scripted_server import HANG, ScriptedServer


class Terminal:
    """A person at `kiln run tiny`."""

    def __init__(self, home: Path) -> None:
        self._main, terminal = pty.openpty()
        environment = python_environment(KILN_HOME=str(home), TERM="dumb")
        command = [*KILN, "run", "tiny"]
        self.process = subprocess.Popen(command, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        self.shown = b""
        self._read_to = 0

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def press_ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def read_until(self, text: str) -> None:
        """Reads until the terminal has shown a text behind the one that was awaited before."""
        while (start := self.shown.find(text.encode(), self._read_to)) < 0:
            assert select.select([self._main], [], [], HANG_S)[0], f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self._main, 65536)
        self._read_to = start + len(text.encode())

    def wait_until_idle(self) -> None:
        """Readline notices a signal only while it waits for a key, which it does just after it has shown one."""
        process, end_s, num_idle = psutil.Process(self.process.pid), time.monotonic() + HANG_S, 0
        while num_idle < 5:
            assert time.monotonic() < end_s
            time.sleep(0.1)
            num_idle = num_idle + 1 if process.status() == psutil.STATUS_SLEEPING else 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def person(server: ScriptedServer, tmp_path: Path) -> Iterator[Terminal]:
    deployment = samples.deployment()
    deployment.capabilities.chat = True
    server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=deployment))
    with announced(tmp_path, StackRecord(0, server.address, server.address, (), is_detached=False)):
        terminal = Terminal(tmp_path)
        yield terminal
        terminal.close()


def test_it_ends_an_answer_and_not_the_chat(server: ScriptedServer, person: Terminal) -> None:
    server.script("Generate", [samples.accepted(), samples.delta(1, "Once", 11), HANG], samples.generation())
    person.read_until(">>> ")
    person.type("Hello\n")
    person.read_until("Once")
    person.press_ctrl_c()
    person.read_until(">>> ")
    assert server.cancelled["Generate"].wait(HANG_S)
    person.type("And then?\n")
    person.read_until("upon")
    person.read_until(">>> ")
    person.type("/bye\n")
    assert person.process.wait(HANG_S) == 0
    turns = [(turn.role, turn.content) for turn in server.requests["Generate"][1].chat.messages]
    assert turns == [("user", "Hello"), ("assistant", "Once"), ("user", "And then?")]


def test_it_gives_up_a_line(server: ScriptedServer, person: Terminal) -> None:
    server.script("Generate", samples.generation())
    person.read_until(">>> ")
    person.type("half a li")
    person.read_until("half a li")
    person.wait_until_idle()
    person.press_ctrl_c()
    person.read_until(">>> ")
    person.type("\x04")  # Ctrl-D
    assert person.process.wait(HANG_S) == 0
    assert server.requests["Generate"] == []
