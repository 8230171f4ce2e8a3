"""`kiln run` on services that a home has announced, which a script answers for."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2
from kiln.runtime.v1 import runtime_pb2
from kiln_client.stack.home import announced

from tests.hang_guard import HANG_S
from tests.servers import responses as samples
from tests.servers.command import KILN, python_environment
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.cli.run.scripted_models import (
    GIB,
    OTHER_DIGEST,
    asked,
    compiled,
    deployment,
    record,
    script_deployments,
)
from tests.service.clients.conftest import Kiln

LONG = ("--override", "neuron_config.seq_len=2048")


def test_compiles_loads_and_answers(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    outcome = kiln("run", "tiny", "Hello", "--temperature", "0.5", "--max-new-tokens", "8")
    assert (outcome.exit_code, outcome.out) == (0, "Once upon\n")
    assert "configuration: batch_size 1," in outcome.err
    (request,) = services.requests["Compile"]
    assert (request.name, request.model) == ("tiny.auto", str(tiny))
    assert request.target.isa == "", "the services of a home compile for its host by themselves"
    (load,) = services.requests["LoadBundle"]
    assert (load.ref, load.deployment_id) == ("tiny:v3", "tiny")
    (generate,) = services.requests["Generate"]
    assert (generate.deployment_id, generate.sampling.temperature, generate.stop.max_new_tokens) == ("tiny", 0.5, 8)
    assert asked(services) == [[("user", "Hello")]]


def test_json(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    outcome = kiln("run", str(tiny), "Hello", "--json")
    assert [line["event"] for line in outcome.lines] == [
        *("configured", "progress", "accepted", "delta", "delta", "finished", "result")
    ]
    assert (outcome.last["text"], outcome.last["deployment_id"]) == ("Once upon", "tiny")


@pytest.mark.parametrize(("fitting", "seq_len"), [(1 << 20, 4096), (2048, 2048), (1023, 896), (64, 64)])
def test_the_sequence_length_is_what_fits(
    services: ScriptedServer, kiln: Kiln, tiny: Path, *, fitting: int, seq_len: int
) -> None:
    services.script("PlanCompile", samples.plan(largest=compiler_pb2.LargestSizes(seq_len=fitting)))
    assert kiln("run", "tiny", "Hello").exit_code == 0
    assert compiled(services)["neuron_config"] == {
        "batch_size": 1,
        "ctx_batch_size": 1,
        "is_continuous_batching": True,
        "on_device_sampling_config": {"dynamic": True},
        "seq_len": seq_len,
        "enable_bucketing": True,
        "context_encoding_buckets": [seq_len],
        "token_generation_buckets": [seq_len],
    }
    plan, final = services.requests["PlanCompile"]
    assert plan.core_memory_bytes == 8 * GIB
    assert json.loads(final.config_json) == compiled(services), "whether the cache has it"


def test_a_person_overrides_what_is_derived(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    words = ("--override", "neuron_config.seq_len=256", "--override", "neuron_config.batch_size=2", "-O", "0")
    assert kiln("run", "tiny", "Hello", *words).exit_code == 0
    neuron = compiled(services)["neuron_config"]
    assert (neuron["seq_len"], neuron["batch_size"], neuron["token_generation_buckets"]) == (256, 2, [256])
    assert services.requests["Compile"][0].optimization_level == compiler_pb2.OPTIMIZATION_LEVEL_O0
    assert services.requests["PlanCompile"] == []


def test_an_adapter_comes_with_the_bundle(
    services: ScriptedServer, kiln: Kiln, tiny: Path, home: Path, tmp_path: Path
) -> None:
    adapter = home / "models" / "pirate"
    adapter.mkdir()
    words = (*LONG, "--adapter", f"ahoy={adapter}", "--override", "neuron_config.lora_config.max_lora_rank=8")
    assert kiln("run", "tiny", "Hello", *words).exit_code == 0
    lora = compiled(services)["neuron_config"]["lora_config"]
    assert lora == {"max_lora_rank": 8, "lora_ckpt_paths": {"ahoy": str(adapter)}}
    assert [request.adapter for request in services.requests["Generate"]] == ["ahoy"]
    for wrong in ("ahoy", f"={adapter}", f"ahoy={tmp_path / 'nothing'}"):
        outcome = kiln("run", "tiny", "Hello", "--adapter", wrong)
        assert outcome.exit_code == 2
        assert "accepted: NAME=PATH, whose PATH exists" in outcome.err


def test_quantize_is_short_for_three_attributes(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    words = (*LONG, "--quantize", "f8e4m3", "--override", "neuron_config.quantization_type=per_tensor_symmetric")
    assert kiln("run", "tiny", "Hello", *words).exit_code == 0
    neuron = compiled(services)["neuron_config"]
    assert (neuron["quantized"], neuron["quantization_dtype"]) == (True, "f8e4m3")
    assert neuron["quantization_type"] == "per_tensor_symmetric", "what is said last"


@pytest.mark.parametrize(
    ("words", "prompts"),
    [
        ((*LONG, "--override", "neuron_config.padding_side=left"), [128, 512, 2048]),
        ((*LONG, "-O", "0"), [128, 2048]),
        (("-O", "0"), [128, 1024]),
    ],
)
def test_prompts_get_several_buckets_if_padding_costs(
    services: ScriptedServer, kiln: Kiln, tiny: Path, words: tuple[str, ...], prompts: list[int]
) -> None:
    services.script("PlanCompile", samples.plan(largest=compiler_pb2.LargestSizes(seq_len=4096)))
    assert kiln("run", "tiny", "Hello", *words).exit_code == 0
    neuron = compiled(services)["neuron_config"]
    assert neuron["context_encoding_buckets"] == prompts
    assert neuron["token_generation_buckets"] == prompts[-1:]


def test_buckets_that_a_person_lists_are_kept(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    words = ("neuron_config.enable_bucketing=true", "neuron_config.context_encoding_buckets=[64, 512]")
    assert kiln("run", "tiny", "Hello", *(part for word in words for part in ("--override", word))).exit_code == 0
    neuron = compiled(services)["neuron_config"]
    assert neuron["context_encoding_buckets"] == [64, 512]
    assert "token_generation_buckets" not in neuron


def test_a_file_says_everything_but_the_sizes(services: ScriptedServer, kiln: Kiln, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("neuron_config: {torch_dtype: float32, tp_degree: 2}\n")
    assert kiln("run", "tiny", "Hello", "--config", path).exit_code == 0
    neuron = {"torch_dtype": "float32", "tp_degree": 2, "batch_size": 1, "seq_len": 1024}
    assert compiled(services) == {"neuron_config": neuron}
    (plan,) = services.requests["PlanCompile"]
    assert plan.core_memory_bytes == 4 * GIB


def test_a_model_that_does_not_fit(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    services.script("PlanCompile", samples.plan(fits=False, largest=compiler_pb2.LargestSizes()))
    outcome = kiln("run", "tiny", "Hello", "--json")
    assert (outcome.error["code"], outcome.error["reason"]) == ("FAILED_PRECONDITION", "MODEL_TOO_LARGE")
    assert "tiny needs 26.0 GiB, and the runtime has 8.0 GiB" in outcome.error["message"]


def test_a_bundle_comes_before_a_checkpoint_of_its_name(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    services.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=samples.bundle(manifest_json=b'{"tp_degree": 1}')))
    assert kiln("run", "tiny", "Hello").exit_code == 0
    (load,) = services.requests["LoadBundle"]
    assert (load.ref, load.deployment_id) == ("tiny", "tiny")
    assert services.requests["Compile"] == []
    late = kiln("run", "tiny", "Hello", "-O", "1", "--json")
    assert (late.exit_code, late.error["reason"]) == (2, "USAGE_INVALID")


def test_what_is_loaded_is_not_loaded_again(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    script_deployments(services, deployment("mine"))
    assert kiln("run", "tiny", "Hello").exit_code == 0
    assert services.requests["LoadBundle"] == []
    assert services.requests["Generate"][0].deployment_id == "mine"


def test_waits_for_a_deployment_that_is_being_loaded(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    loading = deployment(digest=OTHER_DIGEST)
    loading.state = runtime_pb2.Deployment.STATE_LOADING
    script_deployments(services, loading)
    ready = [runtime_pb2.GetDeploymentResponse(deployment=one) for one in (loading, deployment())]
    services.script("GetDeployment", *ready)
    assert kiln("run", "tiny", "Hello").exit_code == 0
    assert services.requests["LoadBundle"] == []


def test_an_idle_deployment_of_an_older_checkpoint_is_replaced(
    services: ScriptedServer, kiln: Kiln, tiny: Path
) -> None:
    script_deployments(services, deployment(digest=OTHER_DIGEST))
    services.script("UnloadBundle", runtime_pb2.UnloadBundleResponse())
    assert kiln("run", "tiny", "Hello").exit_code == 0
    assert services.requests["UnloadBundle"][0].deployment_id == "tiny"
    assert services.requests["LoadBundle"][0].deployment_id == "tiny"


def test_a_busy_deployment_stays(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    script_deployments(services, deployment(digest=OTHER_DIGEST, used_slots=1))
    assert kiln("run", "tiny", "Hello").exit_code == 0
    assert services.requests["UnloadBundle"] == []
    assert services.requests["LoadBundle"][0].deployment_id == "tiny-2"


def test_of_two_commands_that_load_a_model_one_waits(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    none, loaded = (runtime_pb2.ListDeploymentsResponse(deployments=found) for found in ([], [deployment()]))
    services.script("ListDeployments", none, loaded)
    services.script("LoadBundle", [refusal("ALREADY_EXISTS", "DEPLOYMENT_EXISTS")])
    assert kiln("run", "tiny", "Hello").out == "Once upon\n"


def test_what_a_person_serves_answers_as_it_is(server: ScriptedServer, kiln: Kiln, home: Path, tmp_path: Path) -> None:
    """Even if its checkpoint is where these services do not read."""
    path = tmp_path / "elsewhere" / "tiny"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    server.script("GetDeployment", runtime_pb2.GetDeploymentResponse(deployment=deployment(digest=OTHER_DIGEST)))
    server.script("Generate", samples.generation())
    with announced(home, record(server, home, is_detached=False)):
        assert kiln("run", path, "Hello").out == "Once upon\n"
        server.script("GetDeployment", refusal("NOT_FOUND", "DEPLOYMENT_NOT_FOUND"))
        outcome = kiln("run", path, "Hello", "--json")
    assert outcome.error["reason"] == "MODEL_ROOT_MISSING"
    assert f"--model-root {path}" in outcome.error["message"]


def test_services_that_answer_are_not_started_again(services: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere"
    path.mkdir()
    (path / "config.json").write_text("{}")
    script_deployments(services, deployment("other", used_slots=1))
    assert kiln("run", path, "Hello", "--json").error["reason"] == "HOME_BUSY"


def test_a_model_that_is_nowhere(services: ScriptedServer, kiln: Kiln, home: Path) -> None:
    outcome = kiln("run", "nothing", "Hello", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "MODEL_NOT_FOUND")
    (violation,) = outcome.error["fields"]
    assert str(home / "models") in violation["description"]


def test_a_text_without_chat_template_is_completed(services: ScriptedServer, kiln: Kiln, tiny: Path) -> None:
    script_deployments(services, samples.deployment())
    assert kiln("run", "tiny", "Hello").exit_code == 0
    assert services.requests["Generate"][0].text == "Hello"


def test_ps_shows_what_runs_and_asks_with_the_token_of_the_home(
    server: ScriptedServer, kiln: Kiln, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KILN_TOKEN", raising=False)
    script_deployments(server, deployment())
    token = home / "token"
    token.write_text("t0\n")
    with announced(home, replace(record(server, home, is_detached=True), token_path=token)):
        shown = kiln("ps").out
        last = kiln("ps", "--json").last
    assert [text for text in (server.address, "tiny:v3", str(token)) if text not in shown] == []
    services = last["services"]
    assert (services["home"], services["runtime"], services["token_path"]) == (str(home), server.address, str(token))
    assert [one["id"] for one in last["deployments"]] == ["tiny"]
    assert [one["authorization"] for one in server.metadata["ListDeployments"]] == ["Bearer t0"] * 2


def test_without_services(kiln: Kiln, home: Path) -> None:
    assert kiln("ps", "--json").error["reason"] == "SERVICES_NOT_RUNNING"
    assert kiln("down", "--json").last == {"home": str(home), "stopped": False}
    assert kiln("logs", "--json").error["reason"] == "LOG_NOT_FOUND"


def test_logs(kiln: Kiln, home: Path) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "compiler.log").write_text("one\ntwo\nthree\nunfinished")
    (home / "logs" / "runtime.log").write_text("four\n")
    assert kiln("logs", "-n", "2").out == "compiler: two\ncompiler: three\nruntime: four\n"
    assert kiln("logs", "compiler", "-n", "1").out == "three\n"


def test_following_a_log_ends_with_ctrl_c(home: Path) -> None:
    log = home / "logs" / "compiler.log"
    log.parent.mkdir()
    log.write_text("one\n")
    command = [*KILN, "logs", "compiler", "--follow", "--home", str(home)]
    with subprocess.Popen(command, env=python_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"
        with log.open("a") as file:
            file.write("two\n")
        assert process.stdout.readline() == "two\n"
        log.unlink()
        log.write_text("a new log\n")
        assert process.stdout.readline() == "a new log\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
