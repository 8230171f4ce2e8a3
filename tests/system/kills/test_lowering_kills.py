"""SIGKILL, or SIGSTOP, of each process in the middle of a lowering: nothing is half done, or left."""

from __future__ import annotations

import pytest

from tests.system.kills.compiler_actions import RestartedCompiler
from tests.system.kills.compiler_attempts import check_kill
from tests.system.kills.compiler_matrix import LOWERING_KILLS
from tests.system.kills.kill import Kill, as_parameters
from tests.system.kills.points import Point

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("kill", as_parameters(LOWERING_KILLS))
async def test_kill(compiler: RestartedCompiler, kept: str, kill: Kill[Point]) -> None:
    await check_kill(compiler, kept, kill)
