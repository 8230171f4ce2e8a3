"""Metrics of a KV cache in blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edge.metrics import Sample
from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.metrics import list_metrics
from tests.ranks.scheduling import make_parts_scheduler, make_request, run_step


def test_the_kv_cache_is_counted_in_its_own_blocks() -> None:
    scheduler = make_parts_scheduler(BlockManager(8, 4, caches_prefixes=False), max_running=2, max_tokens=8)
    scheduler.add(make_request("a", 8))
    run_step(scheduler)
    engine: Any = SimpleNamespace(scheduler=scheduler)
    deployment: Any = SimpleNamespace(deployment_id="d", engine=engine)
    deployments: Any = SimpleNamespace(list=lambda: [deployment], resources=None)

    def read(name: str) -> list[Sample]:
        (row,) = [row for row in list_metrics(deployments) if row.name == name]
        return list(row.read())

    assert scheduler.num_running == 1, "half of the requests that may run"
    assert read("vllm:kv_cache_usage_perc") == [(("d",), 0.25)]
    assert read("vllm:cache_config_info") == [(("d", "4", "8"), 1)]
