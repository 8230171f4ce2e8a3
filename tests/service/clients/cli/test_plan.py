"""`kiln plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kiln.compiler.v1 import compiler_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]
GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("neuron_config: {seq_len: 256}\n")
    return path


def test_the_request(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    server.script("PlanCompile", samples.plan())
    kiln(
        "plan", config, "--model", "llama", "--target", "trn2", "--core-memory", "12GiB", "-O", "2", "--salt", "s",
        "--isa", "native", "--override", "neuron_config.batch_size=3",
    )  # fmt: skip
    (request,) = server.requests["PlanCompile"]
    assert json.loads(request.config_json) == {"neuron_config": {"seq_len": 256, "batch_size": 3}}
    assert request.model == "llama"
    assert (request.target.kind, request.target.isa) == (compiler_pb2.Target.KIND_TRN2, "native")
    assert request.core_memory_bytes == 12 * GIB
    assert request.optimization_level == compiler_pb2.OPTIMIZATION_LEVEL_O2
    assert request.salt == "s"


def test_json_is_one_object(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    server.script("PlanCompile", samples.plan())
    outcome = kiln("plan", config, "--model", "llama", "--json")
    assert outcome.exit_code == 0
    (record,) = outcome.lines
    assert record["submodels"] == [
        {"name": "context_encoding", "batch": 1, "buckets": [[256, 512]]},
        {"name": "token_generation", "batch": 4, "buckets": [[128], [256]]},
    ]
    assert record["ranks"][1] == {
        "rank": 1,
        "weights_bytes": 8 * GIB,
        "kv_bytes": 4 * GIB,
        "activation_bytes": GIB // 2,
        "code_bytes": GIB // 4,
        "lora_bytes": GIB // 4,
        "limit_bytes": 16 * GIB,
        "weight_groups": [
            {"name": "embedding", "size_bytes": GIB},
            {"name": "mlp", "size_bytes": 7 * GIB},
            {"name": "draft", "size_bytes": 0},
        ],
    }
    assert record["fits"] is True
    assert record["largest"] == {"batch_size": 6, "seq_len": 4096, "pa_num_blocks": 0}
    assert record["executables"] == [
        {"tag": "token_generation_128", "submodel": "token_generation", "bucket": [128], "cache": "hit"}
    ]
    assert record["hints"] == [{"field": "neuron_config.n_positions", "value": "32", "reason": "it is set elsewhere"}]
    assert record["warnings"] == ["neuron_config.seq_len: long"]
    assert record["cores_needed"] == 2
    assert record["cost"] == {"seconds": 90.5, "peak_memory_bytes": GIB, "num_records": 3}
    assert record["config"] == {"neuron_config": {"seq_len": 256}}


def test_what_a_person_sees(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    server.script("PlanCompile", samples.plan())
    lines = kiln("plan", config, "--model", "llama").out.splitlines()
    # 20, 10, 1, 1 and 1 of 40 cells are taken: an eighth of a gigabyte rounds to what makes the sum right.
    assert lines[0].split() == [
        "ranks",
        "0–1",
        "█" * 20 + "▓" * 10 + "▒◆" + "·" * 8,
        "13.0",
        "GiB",
        "of",
        "16.0",
        "GiB,",
        "81%",
    ]
    assert "█ weights  ▓ KV cache  ▒ activations  ◆ LoRA  ░ code" in lines[1]
    shown = "\n".join(" ".join(line.split()) for line in lines)
    for text in (
        "weights 8.0 GiB\nembedding 1.0 GiB\nmlp 7.0 GiB\nKV cache 4.0 GiB",
        "context_encoding 1 256x512\ntoken_generation 4 128, 256",
        "token_generation_128 hit",
        "warning neuron_config.seq_len: long",
        "ignored neuron_config.n_positions 32: it is set elsewhere",
        "cost about 90 s, 1.0 GiB for a lowering, as 3 recorded lowerings took",
    ):
        assert text in shown, shown
    assert lines[-1] == "fits: 13.0 GiB of 16.0 GiB a core; up to batch_size 6, or seq_len 4096"


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        (
            {"cores_needed": 8, "largest": compiler_pb2.LargestSizes(seq_len=4096)},
            "does not fit: needs 8 cores; with seq_len 4096 it fits",
        ),
        (
            {"cores_needed": 8, "largest": compiler_pb2.LargestSizes(batch_size=2, pa_num_blocks=5)},
            "does not fit: needs 8 cores; with batch_size 2 it fits; with pa_num_blocks 5 it fits",
        ),
        ({"cores_needed": 0, "largest": None}, "does not fit: fits on no number of trn1 cores"),
    ],
)
def test_what_does_not_fit(
    server: ScriptedServer, kiln: Kiln, config: Path, fields: dict[str, object], verdict: str
) -> None:
    plan = samples.plan(fits=False, **fields)
    for rank in plan.ranks:
        rank.limit_bytes = 6 * GIB + GIB // 2
    server.script("PlanCompile", plan)
    outcome = kiln("plan", config, "--model", "llama", "--target", "trn1")
    assert outcome.exit_code == 3
    assert outcome.out.splitlines()[-1] == verdict
    assert "█" * 20 + "!" * 20 in outcome.out
    outcome = kiln("plan", config, "--model", "llama", "--target", "trn1", "--json")
    assert (outcome.exit_code, outcome.last["fits"]) == (3, False)


def test_the_check_of_graphs(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    bucket = compiler_pb2.Bucket(tokens=[128])
    found = [
        compiler_pb2.GraphFinding(
            tag="token_generation_128",
            submodel="token_generation",
            bucket=bucket,
            code="NCC_EVRF013",
            operation="sort sort.3 of s64[2,8]",
            accepted="floating-point keys",
            source="execution/sampling.py:80",
        ),
        compiler_pb2.GraphFinding(
            tag="token_generation_128",
            submodel="token_generation",
            bucket=bucket,
            operation="input seq_ids is missing",
            accepted="each that the submodel has, and each is used",
        ),
    ]
    check = compiler_pb2.GraphCheck(num_graphs=2, num_findings=5, findings=found)
    server.script("PlanCompile", samples.plan(graph_check=check))
    outcome = kiln("plan", config, "--model", "llama", "--target", "trn2", "--check-graphs")
    assert server.requests["PlanCompile"][0].check_graphs
    assert outcome.exit_code == 3
    shown = " ".join(outcome.out.split())
    for text in (
        "refused token_generation_128: NCC_EVRF013: sort sort.3 of s64[2,8] at execution/sampling.py:80; accepted",
        "refused token_generation_128: input seq_ids is missing; accepted: each that",
        "refused 3 more",
        "graphs 2 checked for what Neuron's compiler refuses; findings: 5",
    ):
        assert text in shown, shown
    outcome = kiln("plan", config, "--model", "llama", "--check-graphs", "--json")
    assert (outcome.exit_code, outcome.last["graph_check"]["num_findings"]) == (3, 5)
    assert outcome.last["graph_check"]["findings"][0] == {
        "tag": "token_generation_128",
        "submodel": "token_generation",
        "bucket": [128],
        "code": "NCC_EVRF013",
        "operation": "sort sort.3 of s64[2,8]",
        "accepted": "floating-point keys",
        "source": "execution/sampling.py:80",
    }


def test_a_check_without_findings(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    server.script("PlanCompile", samples.plan(graph_check=compiler_pb2.GraphCheck(num_graphs=2)))
    outcome = kiln("plan", config, "--model", "llama", "--check-graphs")
    assert outcome.exit_code == 0
    assert "findings: 0" in outcome.out
    server.script("PlanCompile", samples.plan())
    outcome = kiln("plan", config, "--model", "llama", "--json")
    assert outcome.last["graph_check"] is None
    assert not server.requests["PlanCompile"][-1].check_graphs


def test_a_refusal(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    server.script("PlanCompile", refusal("NOT_FOUND", "CHECKPOINT_NOT_FOUND"))
    outcome = kiln("plan", config, "--model", "llama", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "CHECKPOINT_NOT_FOUND")


@pytest.mark.parametrize("size", ["16GB", "-1", "x", "9" * 30, "8388608TiB"])
def test_a_size_that_is_none(kiln: Kiln, config: Path, size: str) -> None:
    outcome = kiln("plan", config, "--model", "llama", "--core-memory", size, "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (2, "USAGE_INVALID")
