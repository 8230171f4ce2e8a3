"""The command line and the SDK against the real services: compile, load, generate, swap, reset, stop."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kiln_client import Bundles, Compiler, Runtime, chat, compile_request, errors

from tests.clients.processes import KILN, ROOT, python_environment

CONFIG = """
neuron_config:
  seq_len: 64
  batch_size: 2
  torch_dtype: float32
  is_continuous_batching: true
  ctx_batch_size: 1
  on_device_sampling_config: {dynamic: true, global_topk: 32}
"""
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    home = tmp_path_factory.mktemp("home")
    words = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0", "--cores", "2"]
    command = [*KILN, "up", "--home", str(home), *words, "--model-root", "examples/models", "--json"]
    with subprocess.Popen(command, env=python_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        event = json.loads(process.stdout.readline())
        assert event.get("event") == "ready", event
        yield event
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0


@pytest.fixture(scope="module")
def bundle(addresses: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bundle of the shipped model, compiled by the command line."""
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(CONFIG)
    out = kiln(addresses, "compile", path, "--model", "examples/models/kiln-tiny", "--name", "tiny", "-O0")
    assert "tiny:v1" in out
    return "tiny:v1"


@pytest.fixture(scope="module")
def deployment(addresses: dict[str, str], bundle: str) -> str:
    assert "ready" in kiln(addresses, "load", bundle, "--deployment", "demo")
    return "demo"


def kiln(addresses: dict[str, str], *words: object) -> str:
    environment = python_environment(KILN_COMPILER=addresses["compiler"], KILN_RUNTIME=addresses["runtime"])
    command = [*KILN, *map(str, words)]
    result = subprocess.run(
        command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_command_line_and_sdk_generate_the_same(addresses: dict[str, str], deployment: str) -> None:
    shown = kiln(addresses, "generate", "--deployment", deployment, "--prompt", PROMPT, "--max-new-tokens", "12")
    with Runtime(addresses["runtime"]) as runtime:
        events = list(runtime.generate(deployment, PROMPT, max_new_tokens=12))
        completion = runtime.complete(deployment, PROMPT, max_new_tokens=12)
        assert runtime.detokenize(deployment, completion.token_ids) == completion.text
        assert runtime.tokenize(deployment, PROMPT)
        answer = runtime.complete(deployment, chat([{"role": "user", "content": "hi"}]), max_new_tokens=4)
    assert shown == f"{completion.text}\n"
    assert "".join(event.delta.text for event in events) == completion.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert answer.usage.generated_tokens >= 1


def test_dropped_stream_frees_its_slot(addresses: dict[str, str], deployment: str) -> None:
    with Runtime(addresses["runtime"]) as runtime:
        for _ in range(6):  # three times as many as there are slots
            for _event in runtime.generate(deployment, PROMPT, ignore_eos=True):
                break
        completion = runtime.complete(deployment, PROMPT, max_new_tokens=2, timeout_s=20)
        assert completion.usage.generated_tokens == 2
        deadline = time.monotonic() + 5
        while runtime.get_deployment(deployment).load.used_slots and time.monotonic() < deadline:
            time.sleep(0.05)
        assert runtime.get_deployment(deployment).load.used_slots == 0


def test_weights_and_cache_change_while_loaded(addresses: dict[str, str], deployment: str, bundle: str) -> None:
    kiln(addresses, "load-weights", deployment, bundle)
    with Runtime(addresses["runtime"]) as runtime:
        receipt = runtime.reset_kv_cache(deployment)
        epoch = receipt.weight_epoch
        assert receipt.zeroed_bytes == runtime.get_deployment(deployment).kv_bytes
        assert runtime.load_weights(deployment, bundle).weight_epoch == epoch + 1


def test_second_compile_is_a_cache_hit(addresses: dict[str, str], bundle: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    arguments = ("compile", path, "--model", "kiln-tiny", "--name", "again", "-O0", "--json")
    last = json.loads(kiln(addresses, *arguments).splitlines()[-1])
    assert last["cache"] == "hit"
    with Bundles(addresses["compiler"]) as bundles:
        assert bundles.get_bundle(bundle).digest == last["bundle"]


def test_refusals_name_what_is_wrong(addresses: dict[str, str], deployment: str) -> None:
    with Runtime(addresses["runtime"]) as runtime, Compiler(addresses["compiler"]) as compiler:
        with pytest.raises(errors.InvalidArgument) as caught:
            runtime.complete(deployment, PROMPT, temperature=-1.0)
        assert [violation.field for violation in caught.value.fields] == ["sampling.temperature"]
        with pytest.raises(errors.NotFound):
            runtime.complete("nobody", PROMPT)
        with pytest.raises(errors.InvalidArgument) as caught:
            compiler.compile(compile_request("tiny", "kiln-tiny", {"neuron_config": {"seq_lenn": 1}}))
        assert [violation.field for violation in caught.value.fields] == ["neuron_config.seq_lenn"]
