"""What the runtime does in the background goes on after an error that no code expects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from kiln.runtime.v1 import runtime_pb2 as pb
from structlog.testing import capture_logs

from edge.access.key_source import KeyUrl
from runtime_svc.deployments.launcher import FileWatch
from tests.hang_guard import until
from tests.servers.background import Broken, break_task
from tests.servers.key_issuer import Issuer
from tests.servers.runtime import Runtime, serve_runtime
from tests.servers.tokens import SigningKey, bearer, make_claims

PROD = "story@prod"


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, issuer: Issuer) -> AsyncIterator[Runtime]:
    monkeypatch.setattr("edge.supervision.FIRST_RESTART_S", 0.01)
    monkeypatch.setattr("runtime_svc.server.FileWatch", partial(FileWatch, interval_s=0.05))
    refreshing = partial(KeyUrl, refresh_interval_s=0.05, min_fetch_interval_s=0.01)
    monkeypatch.setattr("edge.access.key_source.KeyUrl", refreshing)
    async with serve_runtime(tmp_path, "--follow-interval=0.03", f"--auth-jwks={issuer.url}") as started:
        started.publish(PROD)
        await started.load(PROD, follow_alias=True)
        yield started


async def keep_leases(served: Runtime, issuer: Issuer) -> None:
    digest = served.publish("pirate", bias=31)
    await served.load("pirate", "e")
    await until(lambda: digest in {leased for _, leased in served.bundles.leases})


async def follow(served: Runtime, issuer: Issuer) -> None:
    served.publish(PROD, bias=31)
    await served.wait_for(lambda one: one.roles[0].weight_epoch == 2)


async def watch_files(served: Runtime, issuer: Issuer) -> None:
    launcher: Any = served.engine().weights.launcher
    looks: list[str] = []

    def look(_: Any) -> None:
        looks.append("at every file")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(launcher), "find_changed", look)
        await until(lambda: len(looks) > 1)


async def fetch_keys(served: Runtime, issuer: Issuer) -> None:
    new = SigningKey("new")
    issuer.publish(new)
    # Without a token of that key, which would have the keys fetched, too.
    num_fetches = len(issuer.requests)
    await until(lambda: len(issuer.requests) > num_fetches + 1)
    await served.control.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer(new.sign(make_claims())))


#: What shows that a supervised task goes on.
GO_ON: Final[dict[str, Callable[[Runtime, Issuer], Awaitable[None]]]] = {
    "leases": keep_leases,
    "following": follow,
    "file watch": watch_files,
    "keys": fetch_keys,
}


async def test_every_task_has_a_row(served: Runtime) -> None:
    assert served.server.edge.supervisor.tasks == GO_ON.keys()


@pytest.mark.parametrize("task", GO_ON)
async def test_an_error_does_not_end_a_task(served: Runtime, issuer: Issuer, task: str) -> None:
    supervisor = served.server.edge.supervisor
    with capture_logs() as logs:
        await break_task(supervisor, task)
    (log,) = [log for log in logs if log["event"] == "background task ended"]
    assert (log["task"], type(log["exc_info"])) == (task, Broken)
    await GO_ON[task](served, issuer)
    # Of tasks: the timer of a pause that was broken off at its very end fails, too, and is of none.
    assert {name: num for name in supervisor.tasks if (num := supervisor.failures[name])} == {task: 1}
