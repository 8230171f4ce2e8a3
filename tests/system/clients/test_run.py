"""`kiln run`, `kiln serve` and the commands around them, on real services and the shipped model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from tests.checkpoints.gguf_files import write_gguf
from tests.repository import ROOT
from tests.servers.hub import running_hub
from tests.servers.proxy import set_proxies
from tests.servers.stack import KILN, Outcome
from tests.system.clients.conftest import SMALL, TIMEOUT_S, make_home, run_kiln

_MODELS = ROOT / "examples/models"
_ANSWER = ["--max-new-tokens", "12", "--temperature", "0"]

Kiln = Callable[..., Outcome]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with make_home(tmp_path / "home") as path:
        yield path


@pytest.fixture
def kiln(home: Path) -> Kiln:
    return partial(run_kiln, home)


def test_run_from_nothing_to_an_answer(kiln: Kiln, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing answers there: what goes to this host asks no proxy.
    set_proxies(monkeypatch, "http://127.0.0.1:9")
    model = _MODELS / "kiln-tiny"
    first = kiln("run", model, "Once upon a time", *SMALL, *_ANSWER)
    assert any(event["event"] == "progress" and event.get("stage") == "lower" for event in first.events)
    again = kiln("run", model, "Once upon a time", *SMALL, *_ANSWER)
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
    # A GGUF file of the same model, with its vocabulary and chat template, where the services may read it: they stay.
    file = write_gguf(model, home / "models" / "Tiny.F32.gguf", GGMLQuantizationType.F32)
    of_file = kiln("run", file, "Once upon a time", *SMALL, *_ANSWER).last
    assert (of_file["deployment_id"], of_file["text"]) == ("tiny.f32", first.last["text"])
    assert of_file["usage"]["prompt_tokens"] == first.last["usage"]["prompt_tokens"]
    assert kiln("ps").last["services"]["pid"] == shown["services"]["pid"]
    assert kiln("down").last["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0], ids=lambda kind: kind.name)
def test_gguf_files_of_fewer_bits_answer(kind: GGMLQuantizationType, kiln: Kiln, tmp_path: Path) -> None:
    file = write_gguf(_MODELS / "kiln-tiny", tmp_path / f"tiny.{kind.name}.gguf", kind)
    assert kiln("run", file, "Once upon a time", *SMALL, *_ANSWER).last["text"].strip()


@pytest.mark.slow
def test_code_takes_over_from_graphs_in_a_chat(kiln: Kiln, home: Path) -> None:
    """The second question is asked once the code is compiled."""
    model = _MODELS / "kiln-tiny"
    command = [KILN, "run", str(model), "--home", str(home), *_ANSWER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("Who are you?\n")
        chat.stdin.flush()
        shown = [""]
        while "Ctrl-C" not in shown[-1]:
            shown.append(chat.stdout.readline())
        assert any("the model's graphs answer, up to 1024 tokens" in line for line in shown)
        first = chat.stdout.readline()
        (found,) = kiln("ps").last["deployments"]
        assert found["id"] == "kiln-tiny-quick"
        wait_for_compiles(kiln, home)
        rest, _ = chat.communicate("Who are you?\n/reset\nWho are you?\n/bye\n", timeout=TIMEOUT_S)
    assert "the model is compiled: from here on its code answers" in rest
    assert rest.splitlines()[-1] == first.rstrip("\n"), "graphs and code give the same greedy tokens"
    assert [one["id"] for one in kiln("ps").last["deployments"]] == ["kiln-tiny"]
    again = kiln("run", model, "Who are you?", *_ANSWER)
    assert (again.last["deployment_id"], again.last["text"]) == ("kiln-tiny", first.rstrip("\n"))


@pytest.mark.slow
def test_a_command_leaves_code_for_the_next_one(kiln: Kiln, home: Path) -> None:
    model = _MODELS / "kiln-tiny"
    quick = kiln("run", model, "Who are you?", *_ANSWER)
    assert quick.last["deployment_id"] == "kiln-tiny-quick"
    wait_for_compiles(kiln, home)
    code = kiln("run", model, "Who are you?", *_ANSWER)
    assert (code.last["deployment_id"], code.last["text"]) == ("kiln-tiny", quick.last["text"])
    assert [one["id"] for one in kiln("ps").last["deployments"]] == ["kiln-tiny"]


def wait_for_compiles(kiln: Kiln, home: Path) -> None:
    """Waits until the compiler of the home compiles nothing any more."""
    address = kiln("ps").last["services"]["compiler"]
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        command = [KILN, "operations", "list", "--json", "--compiler", address]
        environment = os.environ | {"KILN_HOME": str(home)}
        listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        if all(operation.get("done") for operation in json.loads(listed)["operations"]):
            return
        time.sleep(0.5)
    raise AssertionError("compiles go on")


@pytest.mark.slow
def test_a_checkpoint_elsewhere(kiln: Kiln, tmp_path: Path) -> None:
    """The services may not read it yet: they start again, and their deployments with them."""
    model = _MODELS / "kiln-tiny"
    first = kiln("run", model, "Once upon a time", *SMALL, *_ANSWER)
    shown = kiln("ps").last
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    assert kiln("run", elsewhere, "Once upon a time", *SMALL, *_ANSWER).last["text"] == first.last["text"]
    restarted = kiln("ps").last
    assert restarted["services"]["pid"] != shown["services"]["pid"]
    assert {one["id"] for one in restarted["deployments"]} == {"kiln-tiny", "elsewhere"}


@pytest.mark.slow
def test_serve_until_it_is_stopped(home: Path, kiln: Kiln) -> None:
    free = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
    with running_hub() as hub:
        hub.add("kiln/tiny", _MODELS / "kiln-tiny")
        words = ["serve", "kiln/tiny", "--yes", *free, *SMALL, "--home", str(home), "--json"]
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
        assert process.wait(TIMEOUT_S) == 0
