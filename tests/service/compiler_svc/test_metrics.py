"""The compiler's metrics: every one of them moves when compiles hit, miss, fail and are cancelled."""

from __future__ import annotations

from pathlib import Path

from compiler_svc.errors import BuildFailed
from tests.servers.metrics import moved, scrape
from tests.servers.running_compiler import serve_compiler


async def test_every_metric_moves(home: Path) -> None:
    async with serve_compiler(home, "--metrics-address", "127.0.0.1:0") as (client, runner):
        before = await scrape(client.metrics_port)
        first = await client.compile()
        await client.reach_build(first)
        second = await client.compile(salt="2")
        await client.reach(second, "waiting for a free build slot")
        change = moved(before, await scrape(client.metrics_port))
        assert change["kiln:builds_running{}"] == 1
        assert change["kiln:compiles_unfinished{}"] == 2
        assert change["kiln:bundle_cache_lookups_total{result=miss}"] == 2
        assert change["kiln:calls_total{code=OK,method=/kiln.compiler.v1.CompilerService/Compile}"] == 2
        await client.cancel(second.name)
        await client.fail(second, "CANCELLED", "COMPILE_CANCELLED")
        assert len(runner.jobs) == 1

        runner.is_open.set()
        await client.finish(first)
        change = moved(before, await scrape(client.metrics_port))
        assert change["kiln:compiles_total{outcome=succeeded}"] == 1
        assert change["kiln:compiles_total{outcome=cancelled}"] == 1
        assert change["kiln:executable_cache_lookups_total{result=miss}"] == 1
        assert change["kiln:compile_stage_seconds_count{stage=lower}"] == 1
        assert change["kiln:compile_stage_seconds_count{stage=cache_check}"] == 2
        assert change["kiln:compile_stage_seconds_sum{stage=lower}"] > 0
        assert "kiln:builds_running{}" not in change

        before = await scrape(client.metrics_port)
        await client.finish(await client.compile())
        change = moved(before, await scrape(client.metrics_port))
        assert change["kiln:bundle_cache_lookups_total{result=hit}"] == 1
        assert not any(key.startswith("kiln:executable_cache_lookups") for key in change)

        runner.error = BuildFailed("no reason")
        before = await scrape(client.metrics_port)
        await client.finish(await client.compile(salt="3"))
        change = moved(before, await scrape(client.metrics_port))
        assert change["kiln:compiles_total{outcome=failed}"] == 1
        assert "kiln:compiles_unfinished{}" not in change
