"""Metrics of a scheduler."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from edge.metrics import Sample
from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.scheduler.scheduler import MAX_COUNTED_ADAPTERS, Scheduler
from runtime_svc.metrics import list_metrics
from tests.ranks.scheduling import give_adapters, make_parts_scheduler, make_request, make_scheduler, run_step


def read(scheduler: Scheduler, name: str) -> list[Sample]:
    engine: Any = SimpleNamespace(scheduler=scheduler)
    deployment: Any = SimpleNamespace(deployment_id="d", engine=engine)
    deployments: Any = SimpleNamespace(list=lambda: [deployment], resources=None)
    (row,) = [row for row in list_metrics(deployments) if row.name == name]
    return list(row.read())


def test_the_kv_cache_is_counted_in_its_own_blocks() -> None:
    scheduler = make_parts_scheduler(BlockManager(8, 4, caches_prefixes=False), max_running=2, max_tokens=8)
    scheduler.add(make_request("a", 8))
    run_step(scheduler)
    assert scheduler.num_running == 1, "half of the requests that may run"
    assert read(scheduler, "vllm:kv_cache_usage_perc") == [(("d",), 0.25)]
    assert read(scheduler, "vllm:cache_config_info") == [(("d", "4", "8"), 1)]


def test_adapters_of_requests_and_slots() -> None:
    scheduler = make_scheduler(num_slots=2)
    assert read(scheduler, "vllm:lora_requests_info") == []
    slots = give_adapters(scheduler, 2, "abc")
    for name in "abac":
        scheduler.add(make_request(name, 4, adapter=slots.find(name)))
    scheduler.add(make_request("", 4))
    while scheduler.num_running < 2:
        run_step(scheduler)
    ((labels, time_s),) = read(scheduler, "vllm:lora_requests_info")
    assert labels == ("d", "2", "a,b", "a,c")
    assert abs(float(time_s) - time.time()) < 60  # type: ignore[arg-type]
    assert read(scheduler, "kiln:adapter_slots_in_use") == [(("d",), 2)]
    assert read(scheduler, "kiln:adapter_requests") == [(("d", "a"), 1), (("d", "b"), 1)]


def test_names_of_adapters_beyond_the_first_are_counted_together() -> None:
    scheduler = make_scheduler()
    names = [f"{number}" for number in range(MAX_COUNTED_ADAPTERS + 5)]
    for name in (*names, *names):
        scheduler.statistics.count_adapter(name)
    samples = dict(read(scheduler, "kiln:adapter_requests"))
    assert len(samples) == MAX_COUNTED_ADAPTERS + 1
    assert samples["d", "other"] == 10
    assert samples["d", "0"] == 2
