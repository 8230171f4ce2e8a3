"""Plans against what is then compiled and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from kiln_client import Compiler, plan_request
from kiln_client.cli.compile.plan import plan_record

from tests.servers.stack import Stack
from tests.system.conftest import CONFIG, TINY

#: How far a prediction may be off.
TOLERANCE = 0.05


def changed(**values: Any) -> dict[str, Any]:
    return {"neuron_config": CONFIG["neuron_config"] | values}


def plan(stack: Stack, config: dict[str, Any], *, salt: str = "") -> dict[str, Any]:
    """What `kiln plan --json` prints for the shipped model at -O0."""
    with Compiler(stack.compiler) as compiler:
        planned = compiler.plan_compile(plan_request(str(TINY), config, optimization_level=0, salt=salt))
    return plan_record(planned)


def cache_of(planned: dict[str, Any]) -> dict[str, str]:
    return {executable["tag"]: executable["cache"] for executable in planned["executables"]}


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
    deployment = stack.get(deployment_id)
    assert sum(rank["weights_bytes"] for rank in planned["ranks"]) == deployment.weights_bytes
    assert sum(rank["kv_bytes"] for rank in planned["ranks"]) == deployment.kv_bytes
    files = {blob["title"]: blob["digest"] for blob in stack.kiln("bundles", "show", ref).last["blobs"]}
    for rank in planned["ranks"]:
        digest = files[f"weights/tp{rank['rank']}_sharded_checkpoint.safetensors"].removeprefix("sha256:")
        mapped = [size for process in stack.ranks() if (size := mapped_bytes(process, digest))]
        assert mapped
        assert mapped == [pytest.approx(rank["weights_bytes"], rel=TOLERANCE)] * len(mapped)


def test_one_rank_maps_what_was_planned(stack: Stack, tiny: str) -> None:
    planned = plan(stack, CONFIG)
    assert planned["fits"]
    assert len(planned["ranks"]) == 1
    check_plan(stack, planned, tiny, "tiny")


@pytest.mark.slow
def test_each_of_two_ranks_maps_what_was_planned(stack: Stack) -> None:
    config = changed(tp_degree=2, enable_bucketing=False, context_encoding_buckets=None, token_generation_buckets=None)
    stack.compile("planned", TINY, config)
    planned = plan(stack, config)
    assert len(planned["ranks"]) == 2
    assert set(cache_of(planned).values()) == {"hit"}
    with stack.deployed("planned"):
        check_plan(stack, planned, "planned", "planned")


@pytest.mark.slow
def test_the_cache_is_known_without_tracing(stack: Stack) -> None:
    config = changed(context_encoding_buckets=[48], token_generation_buckets=[96, 192])
    salt = "plans"
    options = ("--model", TINY, "--name", "planned-cache", "-O", "0", "--salt", salt)
    tags = ["context_encoding_48", "token_generation_96", "token_generation_192"]
    # One executable serves both buckets of token generation.
    missing = {tags[0]: "miss", tags[1]: "miss", tags[2]: "hit"}
    assert cache_of(plan(stack, config, salt=salt)) == missing
    path = stack.home / "planned-cache.json"
    path.write_text(json.dumps(config))
    stack.kiln("compile", path, *options)
    assert cache_of(plan(stack, config, salt=salt)) == dict.fromkeys(tags, "hit")

    other = changed(context_encoding_buckets=[40, 48], token_generation_buckets=[80, 192])
    planned = plan(stack, other, salt=salt)
    hits = dict.fromkeys((tags[0], "token_generation_80", tags[2]), "hit")
    assert cache_of(planned) == {"context_encoding_40": "miss"} | hits
    assert planned["cost"]["seconds"] > 0
    assert planned["cost"]["num_records"] > 0
    path.write_text(json.dumps(other))
    compiled = stack.kiln("compile", path, *options).last
    assert {one["tag"]: one["cache"] for one in compiled["executables"]} == cache_of(planned), "the plan was right"

    assert cache_of(plan(stack, config, salt="other")) == missing
