"""The compiler that the rows of a file kill, one after the other."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.servers.halt import VARIABLE as HALT_VARIABLE
from tests.system.kills.compiler_actions import RestartedCompiler, provide_kept, write_models
from tests.system.kills.compiler_matrix import IDLE_TIMEOUT_S
from tests.system.kills.neuron_double import VARIABLE as NEURON_VARIABLE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestartedCompiler]:
    """A compiler with directories for temporary files of its own.

    It has two processors, so that a pass over a checkpoint writes two ranks, on any machine.
    """
    home = tmp_path_factory.mktemp("kills")
    write_models(home)
    for name in ("files", "run"):
        (home / "temporary" / name).mkdir(parents=True)
    roots = ("--import-root", str(home / "source"), "--model-url", f"file://{home / 'models'}")
    restarted = RestartedCompiler(home, *roots, "--lowerings", "2", f"--build-idle-timeout={IDLE_TIMEOUT_S}")
    allowed = os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TMPDIR", str(home / "temporary" / "files"))
        patch.setitem(os.environ, "XDG_RUNTIME_DIR", str(home / "temporary" / "run"))
        patch.setitem(os.environ, NEURON_VARIABLE, str(restarted.neuron.orders))
        patch.setitem(os.environ, HALT_VARIABLE, str(restarted.halt.folder))
        os.sched_setaffinity(0, sorted(allowed)[:2])
        await restarted.start()
        yield restarted
        await restarted.stop()
        os.sched_setaffinity(0, allowed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(compiler: RestartedCompiler) -> str:
    return await provide_kept(compiler)
