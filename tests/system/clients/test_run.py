"""`kiln run`, `kiln serve` and the commands around them, on real services and the shipped model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lowering_cache import share_lowering_cache
from tests.repository import ROOT
from tests.servers.hub import running_hub
from tests.servers.stack import KILN, Outcome

_TIMEOUT_S = 280
_MODELS = ROOT / "examples/models"
#: What compiles fast.
_SMALL = ["-O", "0", "--override", "neuron_config.seq_len=128", "--override", "neuron_config.torch_dtype=float32"]
_ANSWER = ["--max-new-tokens", "12", "--temperature", "0"]

Kiln = Callable[..., Outcome]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "home"
    share_lowering_cache(path / "cache/compiler")
    yield path
    subprocess.run([KILN, "down", "--home", str(path)], check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)


@pytest.fixture
def kiln(home: Path) -> Kiln:
    """Runs `kiln ARGUMENTS --home HOME --json`."""

    def run(*arguments: str | Path, **variables: str) -> Outcome:
        command = [KILN, *map(str, arguments), "--home", str(home), "--json"]
        result = subprocess.run(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        events = [json.loads(line) for line in result.stdout.splitlines()]
        assert result.returncode == 0, (events[-1:], result.stderr)
        return Outcome(result.returncode, events)

    return run


def test_run_from_nothing_to_an_answer(kiln: Kiln, home: Path, tmp_path: Path) -> None:
    model = _MODELS / "kiln-tiny"
    first = kiln("run", model, "Once upon a time", *_SMALL, *_ANSWER)
    assert any(event["event"] == "progress" and event.get("stage") == "lower" for event in first.events)
    again = kiln("run", model, "Once upon a time", *_SMALL, *_ANSWER)
    assert again.last["text"] == first.last["text"] != ""
    stages = {event["stage"] for event in again.events if event["event"] == "progress"}
    assert "lower" not in stages, "the cache has the bundle"
    shown = kiln("ps").last
    assert shown["services"]["is_detached"]
    assert [(one["id"], one["capabilities"]["max_length"]) for one in shown["deployments"]] == [("kiln-tiny", 128)]
    addresses = {f"KILN_{name.upper()}": shown["services"][name] for name in ("compiler", "runtime")}
    words = ["generate", "--deployment", "kiln-tiny", "--chat", "-", "--json", *_ANSWER]
    chat = json.dumps([{"role": "user", "content": "Once upon a time"}])
    same = subprocess.run(
        [KILN, *words], env=os.environ | addresses, input=chat, capture_output=True, text=True, check=True
    )
    assert json.loads(same.stdout.splitlines()[-1])["text"] == first.last["text"]
    assert kiln("run", "kiln-tiny.auto:v1", "Hello", *_ANSWER).last["deployment_id"] == "kiln-tiny"
    assert any("Compile" in event.get("line", "") for event in kiln("logs", "compiler").events)
    assert kiln("down").last["stopped"]


@pytest.mark.slow
def test_a_checkpoint_elsewhere(kiln: Kiln, tmp_path: Path) -> None:
    """The services may not read it yet: they start again, and their deployments with them."""
    model = _MODELS / "kiln-tiny"
    first = kiln("run", model, "Once upon a time", *_SMALL, *_ANSWER)
    shown = kiln("ps").last
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    assert kiln("run", elsewhere, "Once upon a time", *_SMALL, *_ANSWER).last["text"] == first.last["text"]
    restarted = kiln("ps").last
    assert restarted["services"]["pid"] != shown["services"]["pid"]
    assert {one["id"] for one in restarted["deployments"]} == {"kiln-tiny", "elsewhere"}


@pytest.mark.slow
def test_serve_until_it_is_stopped(home: Path, kiln: Kiln) -> None:
    free = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
    with running_hub() as hub:
        hub.add("kiln/tiny", _MODELS / "kiln-tiny")
        words = ["serve", "kiln/tiny", "--yes", *free, *_SMALL, "--home", str(home), "--json"]
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub")}
        process = subprocess.Popen([KILN, *words], env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1].get("event") in ("ready", None):
                break
        assert events[-1]["event"] == "ready", events[-1]
        assert events[-1]["deployment"]["capabilities"]["max_batch_size"] == 4
        asked = len(hub.requests)
        answered = kiln("run", "kiln/tiny", "Once upon a time", *_ANSWER)
        assert answered.last["deployment_id"] == "tiny"
        assert len(hub.requests) == asked, "what is below the model root is not looked for in the Hub"
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.stdout.read().splitlines()[-1]) == {"event": "stopped"}
        assert process.wait(_TIMEOUT_S) == 0
