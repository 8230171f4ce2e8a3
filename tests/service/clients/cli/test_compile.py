"""`kiln compile`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kiln.compiler.v1 import compiler_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("neuron_config: {seq_len: 256, torch_dtype: float32}\n")
    return path


@pytest.fixture
def compiling(server: ScriptedServer) -> ScriptedServer:
    server.script("Compile", samples.OPERATION)
    lowering = samples.watch_progress(
        "LOWER", executables_done=1, executables_total=2, eta=samples.seconds(12), message="token_generation_256"
    )
    sharding = samples.watch_progress("SHARD", sharded_bytes=1_000_000, total_bytes=4_000_000)
    server.script("WatchCompile", [samples.watch_progress("TRACE"), lowering, sharding, samples.watch_result()])
    return server


def test_json(compiling: ScriptedServer, kiln: Kiln, config: Path) -> None:
    outcome = kiln("compile", config, "--model", "kiln-tiny", "--name", "tiny", "--json")
    assert outcome.exit_code == 0
    assert [line["event"] for line in outcome.lines] == ["started", "progress", "progress", "progress", "result"]
    assert outcome.lines[0]["operation"] == "operations/7"
    assert outcome.lines[2] == {
        "event": "progress",
        "name": "tiny",
        "stage": "lower",
        "executables_done": 1,
        "executables_total": 2,
        "executables_cached": 0,
        "sharded_bytes": 0,
        "total_bytes": 0,
        "eta_seconds": 12.0,
        "message": "token_generation_256",
        "create_time": None,
        "update_time": None,
    }
    assert outcome.last == {
        "event": "result",
        "name": "tiny",
        "version": "tiny:v3",
        "bundle": samples.DIGEST,
        "cache": "miss",
        "executables": [
            {
                "tag": "context_encoding_64",
                "submodel": "context_encoding",
                "bucket": [64],
                "cache": "hit",
                "seconds": None,
                "size_bytes": 1000,
            },
            {
                "tag": "token_generation_256",
                "submodel": "token_generation",
                "bucket": [256],
                "cache": "miss",
                "seconds": 2.5,
                "size_bytes": 2000,
            },
        ],
        "warnings": ["async_mode is a hint that cpu ignores"],
        "seconds": 4.25,
        "operation": "operations/7",
    }
    assert outcome.err == ""


def test_cache_hit(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    server.script("Compile", samples.OPERATION)
    server.script("WatchCompile", [samples.watch_result("HIT")])
    assert kiln("compile", config, "--model", "m", "--name", "tiny", "--json").last["cache"] == "hit"


def test_for_a_person(compiling: ScriptedServer, kiln: Kiln, config: Path) -> None:
    outcome = kiln("compile", config, "--model", "kiln-tiny", "--name", "tiny")
    assert outcome.exit_code == 0
    assert "tiny:v3" in outcome.out
    assert samples.DIGEST in outcome.out
    assert "token_generation_256" in outcome.out
    assert "async_mode is a hint" in outcome.out
    assert outcome.err.splitlines() == [
        "trace",
        "lower 1/2 executables token_generation_256, about 12 s left",
        "shard 1.0 MB/4.0 MB",
    ]
    assert "\x1b" not in outcome.out + outcome.err


def test_request(compiling: ScriptedServer, kiln: Kiln, config: Path) -> None:
    kiln("compile", config, "--model", "kiln-tiny", "--name", "tiny")
    kiln(
        *("compile", config, "--model", "kiln-tiny", "--name", "tiny", "-O0", "--isa", "native", "--target", "cpu"),
        *("--skip-cache-lookup", "--salt", "s", "--debug"),
    )
    plain, full = compiling.requests["Compile"]
    assert (plain.name, plain.model) == ("tiny", "kiln-tiny")
    assert json.loads(plain.config_json) == {"neuron_config": {"seq_len": 256, "torch_dtype": "float32"}}
    assert plain.optimization_level == compiler_pb2.OPTIMIZATION_LEVEL_UNSPECIFIED
    assert not plain.skip_cache_lookup
    assert (plain.debug, full.debug) == (False, True)
    assert full.optimization_level == compiler_pb2.OPTIMIZATION_LEVEL_O0
    assert full.target == compiler_pb2.Target(kind=compiler_pb2.Target.KIND_CPU, isa="native")
    assert (full.skip_cache_lookup, full.salt) == (True, "s")


@pytest.mark.parametrize("level", ["0", "1", "2"])
def test_optimization_levels(compiling: ScriptedServer, kiln: Kiln, config: Path, level: str) -> None:
    kiln("compile", config, "--model", "m", "--name", "tiny", "--optimization-level", level)
    name = compiler_pb2.OptimizationLevel.Name(compiling.requests["Compile"][0].optimization_level)
    assert name == f"OPTIMIZATION_LEVEL_O{level}"


@pytest.mark.parametrize("words", [("compile", "--name", "tiny"), ("plan",)], ids=" ".join)
def test_a_configuration_that_is_misspelt(kiln: Kiln, config: Path, words: tuple[str, ...]) -> None:
    outcome = kiln(*words, "--model", "m", config.with_name("confg.yaml"), "--json")
    assert outcome.exit_code == 2
    assert outcome.error["message"].endswith(f"No such file or directory. Did you mean {config}?")
    assert "Did you mean" not in kiln(*words, "--model", "m", config.with_name("llama"), "--json").error["message"]
    assert "Did you mean" not in kiln(*words, "--model", "m", "nowhere/config.yaml", "--json").error["message"]


def test_configuration_from_standard_input(
    compiling: ScriptedServer, kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b'{"neuron_config": {"seq_len": 64}}'))
    monkeypatch.setattr("sys.stdin", stdin)
    assert kiln("compile", "-", "--model", "m", "--name", "tiny").exit_code == 0
    assert json.loads(compiling.requests["Compile"][0].config_json) == {"neuron_config": {"seq_len": 64}}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"neuron_config: {seq_len: 256", "line 1, column 29"),
        (b"neuron_config:\n  seq_len: 1\n  seq_len: 2\n", "repeated key 'seq_len'"),
        (b"- seq_len: 256\n", "a list"),
        (b"", "null"),
        (b"neuron_config: \xff", "UTF-8"),
    ],
)
def test_unreadable_configuration(
    server: ScriptedServer, kiln: Kiln, tmp_path: Path, content: bytes, named: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    outcome = kiln("compile", path, "--model", "m", "--name", "tiny", "--json")
    assert outcome.exit_code == 1
    assert (outcome.error["code"], outcome.error["reason"]) == ("INVALID_ARGUMENT", "CONFIG_INVALID")
    assert outcome.error["fields"][0]["field"] == "config"
    assert named in outcome.error["fields"][0]["description"]
    assert str(path) in outcome.error["message"]
    assert server.requests["Compile"] == []


def test_every_mistake_is_shown_with_what_is_accepted(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    mistakes = [
        ("neuron_config.seq_lenn", "got 256; accepted: no such name, did you mean seq_len?"),
        ("neuron_config.batch_size", "got zero; accepted: an integer of at least 1"),
    ]
    server.script("Compile", refusal("INVALID_ARGUMENT", "CONFIG_INVALID", "2 mistakes [in] all", fields=mistakes))
    arguments = ("compile", config, "--model", "m", "--name", "tiny")
    outcome = kiln(*arguments)
    assert outcome.exit_code == 1
    assert outcome.out == ""
    assert outcome.err.splitlines() == [
        "error: INVALID_ARGUMENT/CONFIG_INVALID",
        "  2 mistakes [in] all",
        "  neuron_config.seq_lenn",
        "    got 256; accepted: no such name, did you mean seq_len?",
        "  neuron_config.batch_size",
        "    got zero; accepted: an integer of at least 1",
    ]
    error = kiln(*arguments, "--json").error
    assert [(field["field"], field["description"]) for field in error["fields"]] == mistakes


def test_a_message_that_only_repeats_the_mistakes_is_left_out(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    mistakes = [("name", "got A; accepted: lower-case letters"), ("model", "got nothing; accepted: a directory")]
    message = "; ".join(f"{field}: {description}" for field, description in mistakes)
    server.script("Compile", refusal("INVALID_ARGUMENT", "CONFIG_INVALID", message, fields=mistakes))
    outcome = kiln("compile", config, "--model", "m", "--name", "tiny")
    assert outcome.err.splitlines() == [
        "error: INVALID_ARGUMENT/CONFIG_INVALID",
        "  name",
        "    got A; accepted: lower-case letters",
        "  model",
        "    got nothing; accepted: a directory",
    ]


def test_failed_compile(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    server.script("Compile", samples.OPERATION)
    failure = refusal("INTERNAL", "LOWERING_FAILED", "g++ failed")
    answer = [samples.watch_progress("LOWER"), compiler_pb2.WatchCompileResponse(error=failure)]
    server.script("WatchCompile", answer)
    outcome = kiln("compile", config, "--model", "m", "--name", "tiny", "--json")
    assert [line.get("event") for line in outcome.lines] == ["started", "progress", None]
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "LOWERING_FAILED")
    assert outcome.error["metadata"]["operation"] == "operations/7"


def test_restart_of_the_compiler_is_told_and_survived(server: ScriptedServer, kiln: Kiln, config: Path) -> None:
    def restarting() -> None:
        before = [samples.watch_progress("TRACE"), refusal("UNAVAILABLE", "SHUTTING_DOWN", "it is shutting down")]
        server.script("WatchCompile", before, [samples.watch_progress("TRACE"), samples.watch_result()])

    server.script("Compile", samples.OPERATION)
    restarting()
    arguments = ("compile", config, "--model", "m", "--name", "tiny")
    outcome = kiln(*arguments, "--json")
    events = ["started", "progress", "reconnecting", "progress", "result"]
    assert [line["event"] for line in outcome.lines] == events
    assert outcome.lines[2] == {"event": "reconnecting", "reason": "SHUTTING_DOWN", "message": "it is shutting down"}
    restarting()
    outcome = kiln(*arguments)
    assert outcome.exit_code == 0
    assert outcome.err.splitlines() == ["trace", "it is shutting down; trying again", "trace"]


def test_shard_weights(compiling: ScriptedServer, kiln: Kiln) -> None:
    response = compiler_pb2.CompileResponse(name="pirate", version=1, digest=samples.DIGEST)
    sharding = samples.watch_progress("SHARD", sharded_bytes=1_000_000, total_bytes=4_000_000)
    compiling.script("ShardWeights", samples.OPERATION)
    compiling.script("WatchCompile", [sharding, compiler_pb2.WatchCompileResponse(result=response)])
    words = ("shard-weights", "tiny:v3", "--model", "kiln-pirate", "--name", "pirate")
    outcome = kiln(*words, "--skip-cache-lookup", "--json")
    assert [line["event"] for line in outcome.lines] == ["started", "progress", "result"]
    assert (outcome.last["version"], outcome.last["bundle"]) == ("pirate:v1", samples.DIGEST)
    assert (outcome.last["executables"], outcome.last["operation"]) == ([], "operations/7")
    plain = kiln(*words)
    assert plain.err == "shard 1.0 MB/4.0 MB\n"
    assert plain.out.split()[:2] == ["version", "pirate:v1"]
    assert "executable" not in plain.out
    fresh, cached = compiling.requests["ShardWeights"]
    request = {"name": "pirate", "model": "kiln-pirate", "executables_ref": "tiny:v3"}
    assert fresh == compiler_pb2.ShardWeightsRequest(**request, skip_cache_lookup=True)
    assert cached == compiler_pb2.ShardWeightsRequest(**request)


def test_weights_that_fit_no_executable(compiling: ScriptedServer, kiln: Kiln) -> None:
    compiling.script("ShardWeights", refusal("FAILED_PRECONDITION", "GRAPH_ABI_MISMATCH", expected="a", actual="b"))
    outcome = kiln("shard-weights", "tiny:v3", "--model", "m", "--name", "pirate", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "GRAPH_ABI_MISMATCH")
