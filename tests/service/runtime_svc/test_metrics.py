"""Metrics: every one of them moves under a scripted load."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundle.abi.inputs import COMPUTED_CONTEXT
from bundle.manifest import Serving
from edge.errors import AddressUnavailable
from runtime_svc.metrics import list_metrics
from tests.bundles.manifests import DYNAMIC_FLAGS
from tests.hang_guard import until
from tests.servers.metrics import moved, scrape
from tests.servers.refusals import refused
from tests.servers.runtime import declare, hold, serve_runtime, token_request


async def test_every_metric_moves(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--metrics-address=127.0.0.1:0") as served:
        empty = await scrape(served.server.edge.metrics_port)
        assert empty["process_cpu_seconds_total{}"] > 0
        assert empty["kiln:cores{}"] == empty["kiln:free_cores{}"] == 4
        assert empty["kiln:memory_bytes{}"] == empty["kiln:free_memory_bytes{}"] > 0
        await served.deploy(num_slots=2)
        loaded = await scrape(served.server.edge.metrics_port)
        change = moved(empty, loaded)
        assert change["kiln:free_cores{}"] == -1
        assert change["kiln:cores_by_state{state=free,target=cpu}"] == -1
        assert change["kiln:cores_by_state{state=in_use,target=cpu}"] == 1
        assert change["kiln:free_memory_bytes{}"] < 0
        assert change["kiln:deployment_state{model_name=d,state=READY}"] == 1
        assert change["kiln:weight_epoch{model_name=d}"] == 1
        (cache,) = [key for key in change if key.startswith("vllm:cache_config_info")]
        assert cache.endswith("num_gpu_blocks=2}")

        # A step that does not end: of three requests, one runs.
        served.ranks.gate.clear()
        calls = [served.generation.Generate(token_request([5, 6, 7], 4)) for _ in range(3)]
        await served.wait_for_slots(1)
        await until(lambda: len(served.engine().scheduler.waiting) == 2)
        held = await scrape(served.server.edge.metrics_port)
        assert held["vllm:num_requests_running{model_name=d}"] == 1
        assert held["vllm:num_requests_waiting{model_name=d}"] == 2
        assert held["vllm:kv_cache_usage_perc{model_name=d}"] == 0.5
        assert held["kiln:running_calls{method=/kiln.runtime.v1.GenerationService/Generate}"] == 3
        assert held["kiln:connections{}"] == 1
        served.ranks.gate.set()
        for call in calls:
            assert [event async for event in call][-1].finished.usage.generated_tokens == 4

        change = moved(loaded, await scrape(served.server.edge.metrics_port))
        assert change["vllm:prompt_tokens_total{model_name=d}"] == 9
        assert "vllm:prefix_cache_queries_total{model_name=d}" not in change, "there is no cache to look them up in"
        assert change["vllm:generation_tokens_total{model_name=d}"] == 12
        assert change["vllm:request_success_total{finished_reason=length,model_name=d}"] == 3
        assert change["vllm:time_to_first_token_seconds_count{model_name=d}"] == 3
        assert change["vllm:inter_token_latency_seconds_count{model_name=d}"] == 9
        assert change["vllm:e2e_request_latency_seconds_count{model_name=d}"] == 3
        for latency in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
            assert change[f"vllm:{latency}_seconds_sum{{model_name=d}}"] > 0
            assert change[f"vllm:{latency}_seconds_bucket{{le=+Inf,model_name=d}}"] in {3, 9}
        prompts = {key: value for key, value in change.items() if "submodel=context_encoding" in key}
        assert sum(value for key, value in prompts.items() if key.startswith("kiln:computed_tokens_total")) == 9
        padding = [(key, value) for key, value in prompts.items() if key.startswith("kiln:bucket_padding_tokens_total")]
        assert sum(value for _, value in padding) == sum(
            3 * (int(key.partition("bucket=")[2].partition(",")[0]) - 3) for key, _ in padding
        )
        steps = {key: value for key, value in change.items() if key.startswith("kiln:steps_total")}
        assert sum(steps.values()) == served.engine().num_steps

        served.publish("story", bias=9)
        before = await scrape(served.server.edge.metrics_port)
        await served.load_weights("story")
        change = moved(before, await scrape(served.server.edge.metrics_port))
        assert change["kiln:weight_epoch{model_name=d}"] == 1
        assert change["kiln:weight_swap_pause_seconds_count{model_name=d}"] == 1
        assert change["kiln:weight_swap_pause_seconds_sum{model_name=d}"] > 0

        call = await hold(served, token_request([5], 4, request_id="one"))
        before = await scrape(served.server.edge.metrics_port)
        served.ranks.die()
        await refused(call, "UNAVAILABLE", "RANK_DIED")
        await served.wait_for_state("READY")
        change = moved(before, await scrape(served.server.edge.metrics_port))
        assert change["kiln:rank_restarts_total{model_name=d}"] == 1
        assert change["vllm:request_success_total{finished_reason=error,model_name=d}"] == 1

        assert before["kiln:calls_total{code=OK,method=/kiln.runtime.v1.GenerationService/Generate}"] == 3
        # Ranks with cores of their own have the first, see test_neuron_runtime.py, and those with slots the others.
        others = {"kiln:core_memory_bytes", "kiln:adapter_requests", "vllm:lora_requests_info"}
        names = {row.name for row in list_metrics(served.server.deployments)} - others
        missing = [name for name in names if not any(key.startswith(name) for key in before)]
        assert missing == []


async def test_of_the_tokens_that_were_looked_up_some_were_cached(tmp_path: Path) -> None:
    flags = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)
    blocks = {"num_blocks": 64, "block_tokens": 4, "serving": Serving(prefix_caching=True)}
    async with serve_runtime(tmp_path, "--metrics-address=127.0.0.1:0") as served:
        await served.deploy(flags=flags, **blocks)
        for _ in range(2):
            await served.generate([8] * 10)
        samples = await scrape(served.server.edge.metrics_port)
        assert samples["vllm:prefix_cache_queries_total{model_name=d}"] == 20
        assert samples["vllm:prefix_cache_hits_total{model_name=d}"] == 8


async def test_metrics_of_a_deployment_begin_with_its_load_and_end_with_it(tmp_path: Path) -> None:
    declared = declare(tmp_path, {"id": "d", "ref": "story"})
    async with serve_runtime(tmp_path, declared, "--metrics-address=127.0.0.1:0") as served:
        samples = await scrape(served.server.edge.metrics_port)
        assert samples["kiln:deployment_state{model_name=d,state=LOADING}"] == 1
        assert samples["kiln:deployment_state{model_name=d,state=READY}"] == 0
        await served.unload()
        assert not any("model_name=d" in key for key in await scrape(served.server.edge.metrics_port))


async def test_metrics_are_off_by_default_and_a_taken_port_is_named(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, "--metrics-address=127.0.0.1:0") as served:
        port = served.server.edge.metrics_port
        folder = tmp_path / "second"
        folder.mkdir()
        with pytest.raises(AddressUnavailable, match=str(port)):
            async with serve_runtime(folder, f"--metrics-address=127.0.0.1:{port}"):
                pass
    folder = tmp_path / "third"
    folder.mkdir()
    async with serve_runtime(folder) as served:
        assert served.server.edge.metrics_port is None
