"""A model's graphs answer until its code is compiled: `kiln run` on services that a script answers for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from google.longrunning.operations_pb2 import Operation
from kiln.compiler.v1 import compiler_pb2
from kiln.runtime.v1 import runtime_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.cli.run.scripted_models import (
    GIB,
    OTHER_DIGEST,
    asked,
    deployment,
)
from tests.service.clients.conftest import Kiln


def script_uncompiled(server: ScriptedServer) -> None:
    """Lets the cache lack the code of a small model, whose graphs answer as `tiny-quick`."""
    executable = compiler_pb2.ExecutablePlan(tag="token_generation_1024", cache=compiler_pb2.CACHE_RESULT_MISS)
    largest = compiler_pb2.LargestSizes(seq_len=4096)
    ranks = [compiler_pb2.RankPlan(weights_bytes=GIB // 8)]
    server.script("PlanCompile", samples.plan(largest=largest, ranks=ranks, executables=[executable]))
    quick, code = deployment("tiny-quick"), deployment("tiny", OTHER_DIGEST)
    loads = ([runtime_pb2.LoadBundleResponse(deployment=one)] for one in (quick, code))
    server.script("LoadBundle", *loads)
    found = ([], [quick], [quick, code])
    server.script("ListDeployments", *(runtime_pb2.ListDeploymentsResponse(deployments=one) for one in found))
    server.script("UnloadBundle", runtime_pb2.UnloadBundleResponse())
    results = [samples.watch_result() for _ in range(2)]
    results[1].result.digest = OTHER_DIGEST
    server.script("WatchCompile", *([one] for one in results))


def test_graphs_answer_while_the_code_is_compiled(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    script_uncompiled(services)
    outcome = kiln("run", "tiny", "Hello")
    assert (outcome.exit_code, outcome.out) == (0, "Once upon\n")
    assert "until its code is compiled, the model's graphs answer" in outcome.err
    quick, code = services.requests["Compile"]
    assert (quick.name, quick.optimization_level) == ("tiny-quick.auto", compiler_pb2.OPTIMIZATION_LEVEL_O0)
    neuron = json.loads(quick.config_json)["neuron_config"]
    assert (neuron["context_encoding_buckets"], neuron["token_generation_buckets"]) == ([128], [1024])
    assert (code.name, code.optimization_level) == ("tiny.auto", compiler_pb2.OPTIMIZATION_LEVEL_UNSPECIFIED)
    assert json.loads(code.config_json)["neuron_config"]["context_encoding_buckets"] == [4096]
    assert [one.deployment_id for one in services.requests["Generate"]] == ["tiny-quick"]
    assert services.requests["CancelOperation"] == [], "the compile goes on for the next command"


@pytest.mark.parametrize("words", [("--no-quick-start",), ("-O", "1"), ("--override", "neuron_config.seq_len=512")])
def test_who_wants_code_waits_for_it(services: ScriptedServer, kiln: Kiln, tiny: Path, words: tuple[str, ...]) -> None:
    script_uncompiled(services)
    assert kiln("run", "tiny", "Hello", *words).exit_code == 0
    assert [one.name for one in services.requests["Compile"]] == ["tiny.auto"]


def test_a_larger_model_is_compiled_at_once(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    script_uncompiled(services)
    miss = [compiler_pb2.ExecutablePlan(tag="token_generation_1024", cache=compiler_pb2.CACHE_RESULT_MISS)]
    ranks = [compiler_pb2.RankPlan(weights_bytes=GIB // 8)] * 3
    services.script("PlanCompile", samples.plan(executables=miss, ranks=ranks))
    assert kiln("run", "tiny", "Hello").exit_code == 0
    assert [one.name for one in services.requests["Compile"]] == ["tiny.auto"]


def test_code_takes_over_between_two_turns(
    services: ScriptedServer, kiln: Kiln, tiny: Path, say: Callable[..., None]
) -> None:
    script_uncompiled(services)
    say("Hello", "Go on", "And then?")
    services.script("GetOperation", *[samples.OPERATION] * 2, Operation(name=samples.OPERATION.name, done=True))
    outcome = kiln("run", "tiny")
    assert (outcome.exit_code, outcome.out) == (0, "Once upon\n" * 3)
    assert "from here on its code answers" in outcome.err
    assert [one.deployment_id for one in services.requests["Generate"]] == ["tiny-quick", "tiny-quick", "tiny"]
    said = [("user", "Hello"), ("assistant", "Once upon"), ("user", "Go on"), ("assistant", "Once upon")]
    assert asked(services)[-1] == [*said, ("user", "And then?")], "its history is computed again"
    assert [one.deployment_id for one in services.requests["UnloadBundle"]] == ["tiny-quick"]


def test_what_is_too_long_for_graphs_waits_for_the_code(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    script_uncompiled(services)
    services.script("Generate", [refusal("INVALID_ARGUMENT", "PROMPT_TOO_LONG", "too long")], samples.generation())
    outcome = kiln("run", "tiny", "a book", "--json")
    assert [one.deployment_id for one in services.requests["Generate"]] == ["tiny-quick", "tiny"]
    assert (outcome.last["text"], outcome.last["deployment_id"]) == ("Once upon", "tiny")


def test_graphs_go_on_if_the_code_cannot_be_compiled(
    services: ScriptedServer, kiln: Kiln, tiny: Path, say: Callable[..., None]
) -> None:
    script_uncompiled(services)
    services.script("WatchCompile", [samples.watch_result()], refusal("FAILED_PRECONDITION", "TOOLCHAIN_MISSING"))
    services.script("Generate", [refusal("INVALID_ARGUMENT", "PROMPT_TOO_LONG", "too long")], samples.generation())
    say("a book", "Hello")
    outcome = kiln("run", "tiny")
    assert (outcome.exit_code, outcome.out) == (0, "Once upon\n")
    assert "TOOLCHAIN_MISSING" in outcome.err
    assert [one.deployment_id for one in services.requests["Generate"]] == ["tiny-quick"] * 2
    assert services.requests["UnloadBundle"] == []
