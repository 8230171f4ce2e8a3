"""The command line and the SDK against the real services: generate, leave, swap, promote, collect."""

from __future__ import annotations

import json
import shutil

import pytest
from kiln_client import Bundles, Runtime, chat, errors

from targets.cpu import X86_64
from tests.hang_guard import HANG_S
from tests.servers.stack import Stack
from tests.system.conftest import CONFIG, PIRATE, TINY
from tests.system.runtime_process import wait_until

PROMPT = "Once upon a time"


def test_command_line_and_sdk_generate_the_same(stack: Stack, tiny: str) -> None:
    words = ("--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "0")
    shown = stack.kiln("generate", "--deployment", tiny, *words).last["text"]
    with Runtime(stack.runtime) as runtime:
        events = list(runtime.generate(tiny, PROMPT, max_new_tokens=12, temperature=0.0))
        completion = runtime.complete(tiny, PROMPT, max_new_tokens=12, temperature=0.0)
        assert runtime.detokenize(tiny, completion.token_ids) == completion.text
        assert runtime.tokenize(tiny, PROMPT)
        messages = chat([{"role": "user", "content": "hi"}])
        assert runtime.complete(tiny, messages, max_new_tokens=4, ignore_eos=True).usage.generated_tokens == 4
    assert shown == completion.text == "".join(event.delta.text for event in events)


def test_defaults_are_those_of_the_checkpoint(stack: Stack, tiny: str) -> None:
    named = json.loads((TINY / "generation_config.json").read_text())
    with Runtime(stack.runtime) as runtime:
        told = runtime.get_deployment(tiny).capabilities.default_sampling
        used = runtime.complete(tiny, PROMPT, max_new_tokens=1).accepted.sampling
    candidates = CONFIG["neuron_config"]["on_device_sampling_config"]["global_topk"]
    for sampling in (told, used):
        assert sampling.temperature == pytest.approx(named["temperature"])
        assert sampling.top_p == pytest.approx(named["top_p"])
        assert sampling.top_k == min(candidates, named["top_k"])


def test_dropped_stream_frees_its_slot(stack: Stack, tiny: str) -> None:
    with Runtime(stack.runtime) as runtime:
        for _ in range(12):  # three times as many as there are slots
            for _event in runtime.generate(tiny, PROMPT, ignore_eos=True):
                break
        completion = runtime.complete(tiny, PROMPT, max_new_tokens=2, ignore_eos=True, timeout_s=HANG_S)
        assert completion.usage.generated_tokens == 2
        wait_until(lambda: runtime.get_deployment(tiny).load.used_slots == 0)


def test_weights_of_a_fine_tune_are_written_loaded_and_collected(stack: Stack, tiny: str) -> None:
    result = stack.kiln("shard-weights", "tiny", "--model", PIRATE, "--name", "fine-tune").last
    assert (result["version"], result["executables"]) == ("fine-tune:v1", [])
    assert [one["contents"] for one in stack.kiln("bundles", "list", "fine-tune").last["bundles"]] == ["weights"]
    with Runtime(stack.runtime) as runtime:
        with pytest.raises(errors.FailedPrecondition) as caught:
            runtime.load_bundle("fine-tune", "alone")
        assert caught.value.reason == "EXECUTABLES_MISSING"
    digest = result["bundle"]
    stack.kiln("bundles", "lease", "fine-tune", "--holder", "me", "--duration", "10m")
    with Bundles(stack.compiler) as bundles:
        assert "me" in {lease.holder for lease in bundles.list_leases(digest)}
    dry = stack.kiln("bundles", "gc", "--dry-run", "--max-cache-age", "30d").last
    assert (dry["dry_run"], dry["deleted_bundle_count"]) == (True, 0)
    assert dry["kept_blob_count"] > 0
    assert stack.kiln("bundles", "release", "--holder", "me", "--digest", digest).last["released_count"] == 1


def test_import_of_another_layout(stack: Stack, tiny: str) -> None:
    assert stack.shared is not None
    layout = stack.shared.layout.root / "fleet"
    shutil.copytree(stack.home / "store", layout, ignore=shutil.ignore_patterns("jobs"))
    with Bundles(stack.compiler) as bundles:
        digest = bundles.get_bundle("tiny").digest
        assert json.loads(bundles.get_bundle("tiny").manifest_json)["target"]["isa"] == X86_64.resolve("native")
    words = ("bundles", "import", layout, "--name", "promoted", "--source-ref", digest, "--alias", "prod")
    result = stack.kiln(*words, "--alias-etag", "").last
    assert (result["bundle"]["ref"], result["bundle"]["digest"]) == ("promoted:v1", digest)
    assert (result["bundle"]["aliases"], result["copied_blob_count"]) == (["prod"], 0)
    assert result["present_blob_count"] > 0


def test_alias_is_followed(stack: Stack, tiny: str) -> None:
    stack.kiln("bundles", "alias", "tiny", "live")
    with stack.deployed("follower", "tiny@live", "--threads-per-core", "1", "--follow-alias"):
        deployment = stack.get("follower")
        assert (deployment.followed_alias, deployment.threads_per_core) == ("tiny@live", 1)
