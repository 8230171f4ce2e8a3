"""The main function of a forked rank process.

The process waits for calls and answers them; between calls it sleeps. It ends when its parent ends or hangs up.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch

from bundle.errors import KilnError
from bundle.host.shortage import find_shortage
from execution.collectives.communicator import SharedCommunicator
from execution.errors import RankFailed
from execution.executors.executor import preload as preload_executor
from execution.forkserver.worker import Channel, serve_calls
from execution.ranks.control import Call, Done, Launch, Load, StageWeights, decode_call, decode_launch
from execution.ranks.rank import Rank
from targets.registry import find_format

#: Parameters of glibc's `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4


def preload(executable_format: str) -> None:
    """Imports the modules that ranks need to load executables of a format. Importing this module did the rest."""
    preload_executor(executable_format)


def serve_parent(control_fd: int, memory_fd: int, collective_memory_fd: int | None = None) -> None:
    """Serves one parent until it hangs up. Ranks that exchange tensors through the host get memory for collectives."""
    with ExitStack() as stack:
        # It closes with the process: a parent that sees its end kills, before the reason for the end has been written.
        control = Channel(control_fd)
        launch = control.receive(decode_launch)
        torch.set_num_threads(launch.num_threads)
        keep_freed_memory()
        set_environment(launch)
        communicator = None
        if collective_memory_fd is not None:
            communicator = SharedCommunicator(collective_memory_fd, launch.rank, launch.manifest.tp_degree)
            stack.enter_context(communicator.joined())
        rank = Rank(launch, mmap.mmap(memory_fd, 0), communicator)
        control.send(Done())
        serve_calls(control, decode_call, rank.answer, explain=partial(_explain, launch.rank))


def set_environment(launch: Launch) -> None:
    """Tells the libraries that this process will load which core they may take, and where ranks find each other."""
    core = "" if launch.core is None else str(launch.core)
    for name in {executable.format for executable in launch.manifest.executables}:
        found = find_format(name)
        values = {found.core_variable: core, found.meeting_variable: launch.meeting_place}
        os.environ.update({variable: value for variable, value in values.items() if variable and value})


def keep_freed_memory() -> None:
    """Keeps malloc from giving memory back to the system, for the rest of the process's life.

    Every step allocates the same buffers. It would get the large ones as new pages each time, which the system clears:
    of a prompt of 100 tokens in an executable for 512, that was 7 % of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's alone
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)


def _explain(rank: int, call: Call, error: Exception) -> KilnError:
    # A step that lacked memory may have left half a write, as any other that failed.
    shortage = find_shortage(error) if isinstance(call, Load | StageWeights) else None
    return shortage or RankFailed(rank, type(error).__name__)
