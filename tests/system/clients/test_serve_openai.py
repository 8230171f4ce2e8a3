"""`kiln serve --openai`: a model behind the client of OpenAI, in one command."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.hang_guard import HANG_S
from tests.lowering_cache import share_lowering_cache
from tests.repository import ROOT
from tests.servers.stack import KILN

_FREE = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0", "--openai", "127.0.0.1:0"]
#: What compiles fast.
_SMALL = ["-O", "0", "--override", "neuron_config.seq_len=128", "--override", "neuron_config.torch_dtype=float32"]


class Serve:
    """A running `kiln serve --openai --json`."""

    def __init__(self, home: Path, *words: str) -> None:
        command = [KILN, "serve", *words, *_FREE, "--home", str(home), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read_until_ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event.get("event") in ("ready", None):
                return event
        raise AssertionError("it ended before it was ready")

    def gateway(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        (gateway,) = [child for child in children if child.cmdline()[:1] == ["smg::router"]]
        return gateway


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    home = tmp_path / "home"
    share_lowering_cache(home / "cache/compiler")
    started: list[Serve] = []

    def start(*words: str) -> Serve:
        started.append(Serve(home, *words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def ask(url: str, model: str) -> str:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        messages: Any = [{"role": "user", "content": "Once upon a time"}]
        options = {"max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(model=model, messages=messages, **options)  # type: ignore[call-overload]
        return str(whole.choices[0].message.content)


def test_serves_openai_until_it_is_stopped(serve: Callable[..., Serve]) -> None:
    serve_until_stopped(serve)


def serve_until_stopped(serve: Callable[..., Serve]) -> str:
    """Serves the shipped model, asks it and stops it; returns its text."""
    first = serve(str(ROOT / "examples/models/kiln-tiny"), *_SMALL)
    ready = first.read_until_ready()
    assert ready["event"] == "ready", ready
    assert ready["deployment"]["id"] == "kiln-tiny"
    text = ask(ready["openai"], "kiln-tiny")
    assert text
    gateway = first.gateway()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(timeout=60) == 0
    assert not gateway.is_running()
    return text


@pytest.mark.slow
def test_serves_openai_until_it_is_killed(serve: Callable[..., Serve]) -> None:
    text = serve_until_stopped(serve)
    # The runtime brings the first deployment back, and the gateway serves the one that was asked for.
    second = serve("kiln-tiny.auto:v1")
    ready = second.read_until_ready()
    assert ready["event"] == "ready", ready
    assert ready["deployment"]["id"] == "kiln-tiny.auto"
    assert ask(ready["openai"], "kiln-tiny.auto") == text
    gateway = second.gateway()
    second.process.kill()
    assert psutil.wait_procs([gateway], timeout=HANG_S)[1] == [], "the gateway outlived its parent"
