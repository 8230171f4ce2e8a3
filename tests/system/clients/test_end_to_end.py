"""The command line and the SDK against the real services: compile, load, generate, swap, reset, stop."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kiln_client import Bundles, Compiler, Runtime, chat, compile_request, errors

from targets.cpu import X86_64
from tests.hang_guard import HANG_S
from tests.repository import ROOT
from tests.servers.command import KILN, python_environment

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
GREEDY = ("--max-new-tokens", "12", "--temperature", "0")


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    home, layouts = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("layouts")
    words = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0", "--cores", "2"]
    roots = ["--model-root", "examples/models", "--import-root", str(layouts)]
    command = [*KILN, "up", "--home", str(home), *words, *roots, "--json"]
    with subprocess.Popen(command, env=python_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        event = json.loads(process.stdout.readline())
        assert event.get("event") == "ready", event
        yield event | {"home": str(home), "layouts": str(layouts)}
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
    shown = kiln(addresses, "generate", "--deployment", deployment, "--prompt", PROMPT, *GREEDY)
    with Runtime(addresses["runtime"]) as runtime:
        events = list(runtime.generate(deployment, PROMPT, max_new_tokens=12, temperature=0.0))
        completion = runtime.complete(deployment, PROMPT, max_new_tokens=12, temperature=0.0)
        assert runtime.detokenize(deployment, completion.token_ids) == completion.text
        assert runtime.tokenize(deployment, PROMPT)
        answer = runtime.complete(
            deployment, chat([{"role": "user", "content": "hi"}]), max_new_tokens=4, ignore_eos=True
        )
    assert shown == f"{completion.text}\n"
    assert "".join(event.delta.text for event in events) == completion.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert answer.usage.generated_tokens == 4


def test_bundles_are_for_this_host_unless_a_client_says_otherwise(addresses: dict[str, str], bundle: str) -> None:
    with Bundles(addresses["compiler"]) as bundles:
        manifest = json.loads(bundles.get_bundle(bundle).manifest_json)
    assert manifest["target"]["isa"] == X86_64.resolve("native")


def test_defaults_are_those_of_the_checkpoint(addresses: dict[str, str], deployment: str) -> None:
    named = json.loads((ROOT / "examples/models/kiln-tiny/generation_config.json").read_text())
    with Runtime(addresses["runtime"]) as runtime:
        told = runtime.get_deployment(deployment).capabilities.default_sampling
        used = runtime.complete(deployment, PROMPT, max_new_tokens=1).accepted.sampling
    for sampling in (told, used):
        assert sampling.temperature == pytest.approx(named["temperature"])
        assert sampling.top_p == pytest.approx(named["top_p"])
        assert sampling.top_k == 32 < named["top_k"], "the bundle has no more candidates"


def test_dropped_stream_frees_its_slot(addresses: dict[str, str], deployment: str) -> None:
    with Runtime(addresses["runtime"]) as runtime:
        for _ in range(6):  # three times as many as there are slots
            for _event in runtime.generate(deployment, PROMPT, ignore_eos=True):
                break
        completion = runtime.complete(deployment, PROMPT, max_new_tokens=2, ignore_eos=True, timeout_s=HANG_S)
        assert completion.usage.generated_tokens == 2
        deadline = time.monotonic() + HANG_S
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


def test_weights_of_a_fine_tune_are_written_and_loaded(addresses: dict[str, str], deployment: str, bundle: str) -> None:
    pirate = "examples/models/kiln-tiny-pirate"
    lines = kiln(addresses, "shard-weights", bundle, "--model", pirate, "--name", "pirate", "--json").splitlines()
    result = json.loads(lines[-1])
    assert (result["version"], result["executables"]) == ("pirate:v1", [])
    assert kiln(addresses, "bundles", "list", "pirate").splitlines()[1].split()[1] == "weights"
    assert kiln(addresses, "bundles", "list", "tiny").splitlines()[1].split()[1] == "full"
    with Runtime(addresses["runtime"]) as runtime:
        before = runtime.complete(deployment, PROMPT, max_new_tokens=12, temperature=0.0).text
        kiln(addresses, "load-weights", deployment, "pirate")
        assert runtime.complete(deployment, PROMPT, max_new_tokens=12, temperature=0.0).text != before
        kiln(addresses, "load-weights", deployment, bundle)
        assert runtime.complete(deployment, PROMPT, max_new_tokens=12, temperature=0.0).text == before
        with pytest.raises(errors.FailedPrecondition) as caught:
            runtime.load_bundle("pirate", "alone")
        assert caught.value.reason == "EXECUTABLES_MISSING"


def test_leases_and_collection(addresses: dict[str, str], bundle: str) -> None:
    kiln(addresses, "bundles", "lease", bundle, "--holder", "me", "--duration", "10m")
    with Bundles(addresses["compiler"]) as bundles:
        digest = bundles.get_bundle(bundle).digest
        assert "me" in {lease.holder for lease in bundles.list_leases(digest)}
        with pytest.raises(errors.InvalidArgument) as caught:
            bundles.lease_bundle(bundle, "me", duration_s=0.5)
        assert caught.value.reason == "LEASE_INVALID"
    dry = json.loads(kiln(addresses, "bundles", "gc", "--dry-run", "--max-cache-age", "30d", "--json"))
    assert (dry["dry_run"], dry["deleted_bundle_count"]) == (True, 0)
    assert dry["kept_blob_count"] > 0
    released = json.loads(kiln(addresses, "bundles", "release", "--holder", "me", "--digest", digest, "--json"))
    assert released["released_count"] == 1


def test_import_of_another_layout(addresses: dict[str, str], bundle: str) -> None:
    layout = Path(addresses["layouts"]) / "fleet"
    shutil.copytree(Path(addresses["home"]) / "store", layout, ignore=shutil.ignore_patterns("jobs"))
    with Bundles(addresses["compiler"]) as bundles:
        digest = bundles.get_bundle(bundle).digest
    words = ("bundles", "import", layout, "--name", "promoted", "--source-ref", digest, "--alias", "prod")
    result = json.loads(kiln(addresses, *words, "--alias-etag", "", "--json").splitlines()[-1])
    assert (result["bundle"]["ref"], result["bundle"]["digest"]) == ("promoted:v1", digest)
    assert (result["bundle"]["aliases"], result["copied_blob_count"]) == (["prod"], 0)
    assert result["present_blob_count"] > 0


def test_alias_is_followed(addresses: dict[str, str], bundle: str) -> None:
    kiln(addresses, "bundles", "alias", bundle, "live")
    words = ("load", "tiny@live", "--deployment", "follower", "--threads-per-core", "1", "--follow-alias")
    shown = kiln(addresses, *words)
    assert ["follows", "tiny@live"] in [line.split() for line in shown.splitlines()]
    assert "1 threads each" in shown
    kiln(addresses, "unload", "follower")


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
