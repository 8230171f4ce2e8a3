"""Forkservers with processes that need no torch, and what is left when any of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import psutil
import pytest

from bundle.host.confinement import Confinement
from execution.forkserver.child import ChildProcess
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call, ForkRequest, encode
from tests.hang_guard import HANG_S, until
from tests.processes import lives
from tests.repository import ROOT

NOTHING = Call("os:getpid")
FOREVER = Call("time:sleep", (600,))
FAMILY = "tests.service.execution.forkserver.family"
MEMBERS = ("front", "builds", "build", "rank", "lowerings", "lowering", "compiler", "loner", "orphan")


def execute(code: str) -> Call:
    return Call("builtins:exec", (code,))


@pytest.fixture
def forkserver() -> Iterator[Forkserver]:
    with contextlib.closing(Forkserver("forkserver", NOTHING, environment={"KILN_TEST": "2"})) as forkserver:
        yield forkserver


def begin(forkserver: Forkserver, call: Call, **options: Any) -> tuple[ChildProcess, TextIO]:
    """A process, and where to read what it writes."""
    read_fd, write_fd = os.pipe()
    process = forkserver.start(call, name="one", stderr_fd=write_fd, **options)
    os.close(write_fd)
    return process, os.fdopen(read_fd)


async def run(forkserver: Forkserver, call: Call, **options: Any) -> tuple[int | None, str]:
    """Exit code of a process, and what it wrote."""
    process, output = begin(forkserver, call, **options)
    exit_code = await process.wait()
    with output:
        return exit_code, output.read()


async def started(forkserver: Forkserver) -> tuple[ChildProcess, psutil.Process]:
    """A process that sleeps."""
    process, output = begin(forkserver, execute("print(flush=True); import time; time.sleep(600)"))
    with output:
        assert await asyncio.to_thread(output.readline) == "\n"
    # The report may come after what the process wrote.
    return process, psutil.Process(await until(lambda: process.pid))


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("import os; os._exit(3)", 3),
        ("raise ValueError", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(0, signal.SIGKILL)", -signal.SIGKILL),
    ],
)
async def test_how_a_process_ends(forkserver: Forkserver, code: str, exit_code: int) -> None:
    assert (await run(forkserver, execute(code)))[0] == exit_code


async def test_what_a_process_writes(forkserver: Forkserver) -> None:
    code = "import os; print('out', flush=True); os.write(2, b'err'); raise KeyError"
    _, output = await run(forkserver, execute(code))
    assert output.startswith("out\nerrTraceback (most recent call last):")
    assert output.endswith("KeyError\n")


async def test_what_a_process_is(forkserver: Forkserver) -> None:
    process, seen = await started(forkserver)
    assert (seen.name(), os.getsid(seen.pid), seen.num_threads()) == ("one", seen.pid, 1)
    parent = seen.parent()
    assert parent is not None
    assert (parent.name(), parent.environ()["KILN_TEST"]) == ("forkserver", "2")
    assert os.getsid(parent.pid) == parent.pid
    # Standard input, output and error.
    assert seen.num_fds() == 3
    await process.end()
    assert process.exit_code == -signal.SIGKILL


async def test_what_a_process_may_do(forkserver: Forkserver) -> None:
    look = execute(
        "import resource, subprocess as s; s.run(['grep', 'NoNewPrivs', '/proc/self/status']); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[1], max(resource.getrlimit(resource.RLIMIT_CORE)))"
    )
    exit_code, output = await run(forkserver, look, confinement=Confinement(open_files=99))
    assert exit_code == 0
    assert output.split() in (["NoNewPrivs:", "1", "99", core] for core in "01")


async def test_what_is_loaded_is_loaded_once_and_shared() -> None:
    load = execute("import os, decimal; print(os.getpid(), flush=True)")
    with contextlib.closing(Forkserver("forkserver", load)) as forkserver:
        for _ in range(2):
            frozen = execute("import gc, sys; print('decimal' in sys.modules, gc.get_freeze_count() > 1000)")
            assert await run(forkserver, frozen) == (0, "True True\n")


async def test_a_warm_start_takes_milliseconds(forkserver: Forkserver) -> None:
    await run(forkserver, NOTHING)
    durations_s = []
    for _ in range(15):
        begun = time.perf_counter()
        await run(forkserver, NOTHING)
        durations_s.append(time.perf_counter() - begun)
    # The least, because other processes may keep the processors busy.
    assert min(durations_s) < 0.06


async def test_a_process_gets_descriptors(forkserver: Forkserver) -> None:
    read_fd, write_fd = os.pipe()
    process = forkserver.start(Call("os:closerange", (100,)), [write_fd], name="one")
    os.close(write_fd)
    assert await process.wait() == 0
    # No copy is left, neither in the process nor in its forkserver.
    assert select.select([read_fd], [], [], HANG_S)[0] == [read_fd]
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)


async def test_a_process_that_is_not_wanted_before_it_begins() -> None:
    with contextlib.closing(Forkserver("slow", FOREVER)) as forkserver:
        process = forkserver.start(NOTHING, name="one")
        async with asyncio.timeout(HANG_S):
            await process.end()
        assert (process.pid, process.exit_code) == (None, -signal.SIGKILL)


async def test_a_process_that_is_not_wanted_while_it_is_announced(forkserver: Forkserver) -> None:
    other, _ = await started(forkserver)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        request = encode(ForkRequest(name="one", call=NOTHING, confinement=Confinement()))
        # It hangs up before the forkserver looks, and reads afterwards what the forkserver said.
        ours.shutdown(socket.SHUT_WR)
        socket.send_fds(forkserver.connect(), [request], [theirs.fileno(), sys.stderr.fileno()])
    process = ChildProcess(ours, None)
    async with asyncio.timeout(HANG_S):
        assert await process.wait() == -signal.SIGKILL
    assert process.pid is None
    assert (await run(forkserver, NOTHING))[0] == 0
    assert not other.has_ended
    await other.end()


@pytest.mark.parametrize("session", ["", "setsid "], ids=["its session", "another session"])
async def test_what_a_process_runs_ends_with_it(forkserver: Forkserver, session: str) -> None:
    for end in (ChildProcess.kill, lambda process: os.kill(process.pid, signal.SIGSEGV)):
        # While the others are killed, a shell whose command has been killed would have the time to go on.
        others = "for one in $(seq 200); do sleep 600 & done"
        command = f"{session}sh -c '(sleep 600; echo ended) & {others}; echo begun; wait'"
        process, output = begin(forkserver, Call("os:system", (command,)))
        with output:
            assert await asyncio.to_thread(output.readline) == "begun\n"
            end(process)
            await process.wait()
            # Nothing holds the pipe any more.
            assert output.read() == ""


async def test_what_a_process_leaves_behind_ends_and_what_others_run_does_not(forkserver: Forkserver) -> None:
    process, seen = await started(forkserver)
    # Its output ends when nothing holds the pipe any more.
    assert await run(forkserver, Call("os:system", ("setsid sleep 600 &",))) == (0, "")
    assert lives(seen)
    await process.end()


async def test_a_forkserver_that_dies_and_another_one(forkserver: Forkserver) -> None:
    process, seen = await started(forkserver)
    first = seen.parent()
    assert first is not None
    first.kill()
    assert await process.wait() is None
    assert process.forkserver_exit_code == -signal.SIGKILL
    assert not lives(seen)
    process, seen = await started(forkserver)
    assert seen.parent() not in (None, first)
    await process.end()


async def test_a_stopped_forkserver_is_ended_and_another_takes_its_place() -> None:
    with contextlib.closing(Forkserver("stopped", NOTHING, patience_s=0.5)) as forkserver:
        process, seen = await started(forkserver)
        first = seen.parent()
        assert first is not None
        await asyncio.sleep(1)
        assert seen.parent() == first, "one that answers lives on"
        first.suspend()
        asked = forkserver.start(NOTHING, name="two")
        async with asyncio.timeout(HANG_S):
            assert await asked.wait() is None
            assert await process.wait() is None
        assert process.forkserver_exit_code == -signal.SIGKILL
        assert not lives(seen)
        assert (await run(forkserver, NOTHING))[0] == 0


async def test_a_stopped_forkserver_that_another_one_forked() -> None:
    with (
        contextlib.closing(Forkserver("parent", NOTHING)) as parent,
        contextlib.closing(Forkserver("child", NOTHING, parent=parent, patience_s=0.5)) as forkserver,
    ):
        process, seen = await started(forkserver)
        first = seen.parent()
        assert first is not None
        first.suspend()
        async with asyncio.timeout(HANG_S):
            assert await process.wait() is None
        assert not lives(seen)
        assert (await run(forkserver, NOTHING))[0] == 0


async def test_a_forkserver_that_loads_has_as_long_as_it_computes() -> None:
    load = execute("import time; end = time.process_time() + 1\nwhile time.process_time() < end: pass")
    with contextlib.closing(Forkserver("loading", load, patience_s=0.3)) as forkserver:
        assert (await run(forkserver, NOTHING))[0] == 0
    with contextlib.closing(Forkserver("waiting", FOREVER, patience_s=0.5)) as forkserver:
        asked = forkserver.start(NOTHING, name="one")
        async with asyncio.timeout(HANG_S):
            assert await asked.wait() is None


@pytest.mark.parametrize("load", [Call("no_such_module:load"), execute("raise SystemExit(1)")])
async def test_a_forkserver_that_cannot_load(load: Call) -> None:
    with contextlib.closing(Forkserver("broken", load)) as forkserver:
        process = forkserver.start(NOTHING, name="one")
        assert await process.wait() is None
        assert (process.pid, process.forkserver_exit_code) == (None, 1)


async def test_a_forkserver_with_threads_does_not_fork() -> None:
    with contextlib.closing(Forkserver("threads", Call(f"{FAMILY}:start_thread"))) as forkserver:
        for _ in range(2):
            exit_code, output = await run(forkserver, NOTHING)
            assert exit_code == 1
            assert "RuntimeError: a process with 2 threads cannot be forked" in output


async def test_closing_ends_the_processes(forkserver: Forkserver) -> None:
    process, seen = await started(forkserver)
    forkserver.close()
    # The forkserver is killed; it may have reaped the process before.
    assert await process.wait() in (None, -signal.SIGKILL)
    assert not lives(seen)
    forkserver.close()


@pytest.fixture
def family() -> Iterator[dict[str, psutil.Process]]:
    """The processes of `family`, by name."""
    with subprocess.Popen(
        [sys.executable, "-m", FAMILY], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as front:
        assert front.stderr is not None
        pids: dict[str, int] = {}
        while len(pids) < len(MEMBERS):
            name, pid = front.stderr.readline().split()
            pids[name] = int(pid)
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        yield processes
        for process in processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize(
    ("victims", "survivors"),
    [
        (("front",), ""),
        (("builds",), "front"),
        (("build",), "front builds lowerings"),
        (("rank",), "front builds build lowerings lowering compiler loner orphan"),
        (("lowerings",), "front builds build rank"),
        (("lowering",), "front builds build rank lowerings"),
        (("front", "builds"), ""),
        (("build", "lowering"), "front builds lowerings"),
        (("lowering", "build"), "front builds lowerings"),
        (("lowering", "lowerings"), "front builds build rank"),
        (("lowerings", "front"), ""),
    ],
)
def test_nothing_is_left_of_a_killed_process(
    family: dict[str, psutil.Process], victims: tuple[str, ...], survivors: str
) -> None:
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has died of the one before
            family[victim].kill()
    gone = [process for name, process in family.items() if name not in survivors.split()]
    deadline = time.monotonic() + HANG_S
    while any(map(lives, gone)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [name for name in MEMBERS if lives(family[name])] == survivors.split()


def test_a_forkserver_whose_parent_dies_ends_what_a_process_has_left_behind() -> None:
    front = f"""
import asyncio
from execution.forkserver.client import Forkserver
from execution.forkserver.protocol import Call

async def run():
    forkserver = Forkserver("forkserver", Call("{FAMILY}:lose_parent"))
    await forkserver.start(Call("os:system", ("setsid sleep 600 & echo $! >&2",)), name="one").wait()

asyncio.run(run())
"""
    with subprocess.Popen([sys.executable, "-c", front], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        loner = psutil.Process(int(process.stderr.readline()))
        assert process.wait() == -signal.SIGKILL
        _, left = psutil.wait_procs([loner], HANG_S)
        for one in left:
            one.kill()
        assert left == []
