"""Three generations of processes, all forked: a front, its build and the build's lowering, which runs three compilers.

One is in the lowering's session, one in its own, and of one the parent has ended.

Each writes its name and its process id to standard error, which all share with the test.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from execution.forkserver.client import Forkserver, ForkserverClient
from execution.forkserver.parent_death import end_tree_with_parent
from execution.forkserver.protocol import Call

NOTHING = Call("os:getpid")


def note(name: str, pid: int) -> None:
    sys.stderr.write(f"{name} {pid}\n")
    sys.stderr.flush()


async def front() -> None:
    builds = Forkserver("builds", NOTHING)
    lowerings = Forkserver("lowerings", NOTHING, parent=builds)
    fds = [lowerings.connect().fileno(), builds.connect().fileno()]
    build = builds.start(Call(f"{__spec__.name}:build"), fds, name="build")
    await build.wait()
    await asyncio.sleep(600)


def build(lowerings_fd: int, builds_fd: int) -> None:
    lowerings, builds = (ForkserverClient(socket.socket(fileno=fd)) for fd in (lowerings_fd, builds_fd))
    note("build", os.getpid())
    note("builds", os.getppid())

    async def wait() -> None:
        rank = builds.start(Call(f"{__spec__.name}:rank"), name="rank")
        lowering = lowerings.start(Call(f"{__spec__.name}:lower"), name="lowering")
        await asyncio.gather(rank.wait(), lowering.wait())

    asyncio.run(wait())
    time.sleep(600)


def rank() -> None:
    note("rank", os.getpid())
    time.sleep(600)


def lower() -> None:
    end_tree_with_parent(os.getppid())
    note("lowering", os.getpid())
    note("lowerings", os.getppid())
    subprocess.run(["sh", "-c", "setsid sleep 600 & echo orphan $! >&2"], check=True)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep) as compiler, subprocess.Popen(sleep, start_new_session=True) as loner:
        note("compiler", compiler.pid)
        note("loner", loner.pid)


def lose_parent() -> None:
    """Lets a forkserver's parent die as soon as the forkserver waits for a process that it has killed."""
    wait, parent = os.waitpid, os.getppid()

    def wait_as_orphan(pid: int, options: int) -> tuple[int, int]:
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.001)
        return wait(pid, options)

    os.waitpid = wait_as_orphan


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


if __name__ == "__main__":
    note("front", os.getpid())
    asyncio.run(front())
