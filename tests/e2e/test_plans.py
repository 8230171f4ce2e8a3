"""Plans against what is then compiled and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.compiler_svc.header_checkpoint import LLAMA_70B, LLAMA_70B_SHARDS, write_headers
from tests.e2e.conftest import CONFIG, TINY
from tests.e2e.stack import Stack

#: How far a prediction may be off.
TOLERANCE = 0.05


def changed(**values: Any) -> dict[str, Any]:
    return {"neuron_config": CONFIG["neuron_config"] | values}


def plan(stack: Stack, config: dict[str, Any], *options: str, model: str | Path = TINY) -> dict[str, Any]:
    path = stack.home / "to-plan.json"
    path.write_text(json.dumps(config))
    planned = stack.kiln("plan", path, "--model", model, *options, check=False)
    assert len(planned.events) == 1
    assert planned.exit_code == (0 if planned.last["fits"] else 3), planned.last
    return planned.last


def cache_of(planned: dict[str, Any]) -> dict[str, str]:
    return {executable["tag"]: executable["cache"] for executable in planned["executables"]}


def list_ranks(stack: Stack) -> list[psutil.Process]:
    children = psutil.Process(stack.process.pid).children(recursive=True)
    return [process for process in children if process.name().startswith("kiln-rank")]


def mapped_bytes(process: psutil.Process, hexadecimal: str) -> int:
    """What `smaps` says that a process has mapped of a blob."""
    lines = Path(f"/proc/{process.pid}/smaps").read_text().splitlines()
    is_blob, total = False, 0
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            is_blob = line.endswith(hexadecimal)
        elif name == "Size:" and is_blob:
            total += 1024 * int(rest.split()[0])
    return total


def check_plan(stack: Stack, planned: dict[str, Any], deployment_id: str, ref: str) -> None:
    """Compares weights and KV cache as planned with what the runtime counts, and with what each rank has mapped."""
    request = runtime.GetDeploymentRequest(deployment_id=deployment_id)
    deployment = stack.runtime_service().GetDeployment(request).deployment
    assert sum(rank["weights_bytes"] for rank in planned["ranks"]) == deployment.weights_bytes
    assert sum(rank["kv_bytes"] for rank in planned["ranks"]) == deployment.kv_bytes
    files = {blob["title"]: blob["digest"] for blob in stack.kiln("bundles", "show", ref).last["blobs"]}
    for rank in planned["ranks"]:
        digest = files[f"weights/tp{rank['rank']}_sharded_checkpoint.safetensors"].removeprefix("sha256:")
        mapped = [size for process in list_ranks(stack) if (size := mapped_bytes(process, digest))]
        assert mapped
        assert mapped == [pytest.approx(rank["weights_bytes"], rel=TOLERANCE)] * len(mapped)


def test_one_rank_maps_what_was_planned(stack: Stack, tiny: str) -> None:
    planned = plan(stack, CONFIG, "-O", "0")
    assert planned["fits"]
    assert len(planned["ranks"]) == 1
    check_plan(stack, planned, tiny, "tiny")


def test_each_of_two_ranks_maps_what_was_planned(stack: Stack) -> None:
    config = changed(tp_degree=2, enable_bucketing=False, context_encoding_buckets=None, token_generation_buckets=None)
    stack.compile("planned", TINY, config)
    planned = plan(stack, config, "-O", "0")
    assert len(planned["ranks"]) == 2
    assert set(cache_of(planned).values()) == {"hit"}
    stack.kiln("load", "planned", "--deployment", "planned")
    check_plan(stack, planned, "planned", "planned")
    stack.kiln("unload", "planned")


def test_the_cache_is_known_without_tracing(stack: Stack) -> None:
    config = changed(context_encoding_buckets=[48], token_generation_buckets=[96, 192])
    options = ("-O", "0", "--salt", "plans")
    tags = ["context_encoding_48", "token_generation_96", "token_generation_192"]
    assert cache_of(plan(stack, config, *options)) == dict.fromkeys(tags, "miss")
    path = stack.home / "planned-cache.json"
    path.write_text(json.dumps(config))
    stack.kiln("compile", path, "--model", TINY, "--name", "planned-cache", *options)
    assert cache_of(plan(stack, config, *options)) == dict.fromkeys(tags, "hit")

    other = changed(context_encoding_buckets=[48], token_generation_buckets=[80, 192])
    planned = plan(stack, other, *options)
    assert cache_of(planned) == {tags[0]: "hit", "token_generation_80": "miss", tags[2]: "hit"}
    assert planned["cost"]["seconds"] > 0
    assert planned["cost"]["num_records"] > 0
    path.write_text(json.dumps(other))
    compiled = stack.kiln("compile", path, "--model", TINY, "--name", "planned-cache", *options).last
    assert {one["tag"]: one["cache"] for one in compiled["executables"]} == cache_of(planned), "the plan was right"

    assert set(cache_of(plan(stack, config, "-O", "0", "--salt", "other")).values()) == {"miss"}


def test_70b_from_headers(stack: Stack) -> None:
    model = write_headers(stack.models / "70b", LLAMA_70B, num_shards=LLAMA_70B_SHARDS)
    config = {"neuron_config": {"tp_degree": 8, "seq_len": 4096}}
    planned = plan(stack, config, "--target", "trn1", model=model)
    assert (planned["fits"], planned["cores_needed"], planned["largest"]) == (False, 16, None)
    config["neuron_config"]["tp_degree"] = 16
    assert plan(stack, config, "--target", "trn1", model=model)["fits"]
