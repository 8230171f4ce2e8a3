"""`kiln serve --openai`: a model behind the client of OpenAI, in one command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from kiln_client import AsyncRuntime, Runtime, chat
from kiln_client.cli.local.serve import find_tool_call_parser
from transformers import AutoModelForCausalLM

from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.adapters import make_adapter
from tests.checkpoints.tiny_models import TinyModel
from tests.hang_guard import HANG_S
from tests.lowering_cache import share_lowering_cache
from tests.servers.runtime import serve_runtime
from tests.servers.stack import KILN
from tests.system.clients.conftest import SMALL
from tests.system.conftest import TINY
from tests.tools import require_tool

_FREE = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0", "--openai", "127.0.0.1:0"]
#: What a person has for the Hub and S3.
_CREDENTIALS = {"HF_TOKEN": "hf_secret", "AWS_SECRET_ACCESS_KEY": "secret"}


class Serve:
    """A running `kiln serve --openai --json` of a person with credentials.

    Args:
        trace: File that gets every connection of every process, and what is sent to an address without one.
    """

    def __init__(self, home: Path, *words: str, trace: Path | None = None) -> None:
        command = [KILN, "serve", *words, *_FREE, "--home", str(home), "--json"]
        if trace is not None:
            options = ("-D", "-f", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(trace))
            command = [str(require_tool("strace")), *options, *command]
        # What others would reach by a proxy on this host would not show.
        variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables | _CREDENTIALS)

    def read_until_ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            assert "event" in event, event
            if event["event"] == "ready":
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

    def start(*words: str, trace: Path | None = None) -> Serve:
        started.append(Serve(home, *words, trace=trace))
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
        parts = client.chat.completions.create(model=model, messages=messages, stream=True, **options)  # type: ignore[call-overload]
        text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
        assert text == whole.choices[0].message.content
        return text


@pytest.mark.slow
def test_serves_openai_until_it_is_stopped(serve: Callable[..., Serve]) -> None:
    assert serve_until_stopped(serve)


def serve_until_stopped(serve: Callable[..., Serve]) -> str:
    """Serves the shipped model, asks it and stops it; returns its text."""
    first = serve(str(TINY), *SMALL)
    ready = first.read_until_ready()
    assert ready["deployment"]["id"] == "kiln-tiny"
    text = ask(ready["openai"], "kiln-tiny")
    gateway = first.gateway()
    assert find_holders(first.process.pid) == {"compiler_svc"}
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
    assert ready["deployment"]["id"] == "kiln-tiny.auto"
    assert ask(ready["openai"], "kiln-tiny.auto") == text
    gateway = second.gateway()
    second.process.kill()
    assert psutil.wait_procs([gateway], timeout=HANG_S)[1] == [], "the gateway outlived its parent"


@pytest.mark.slow
def test_an_adapter_is_a_model(serve: Callable[..., Serve], tmp_path: Path) -> None:
    adapter = tmp_path / "adapters/loud"
    tiny = TinyModel(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), Checkpoint.open(TINY))
    make_adapter(tiny, adapter)
    ready = serve(str(TINY), *SMALL, "--adapter", f"loud={adapter}").read_until_ready()
    with openai.OpenAI(base_url=ready["openai"], api_key="none") as client:
        assert {model.id for model in client.models.list()} == {"kiln-tiny", "loud"}
    texts = {name: ask(ready["openai"], name) for name in ("kiln-tiny", "loud")}
    assert texts["kiln-tiny"] != texts["loud"]
    with Runtime(ready["runtime"]) as runtime:
        for name, adapter_name in (("kiln-tiny", ""), ("loud", "loud")):
            prompt = chat([{"role": "user", "content": "Once upon a time"}])
            options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "adapter": adapter_name}
            assert runtime.complete("kiln-tiny", prompt, **options).text == texts[name]


@pytest.mark.slow
def test_calls_of_tools_are_read_as_the_template_writes_them(serve: Callable[..., Serve]) -> None:
    ready = serve(str(TINY.with_name("kiln-tiny-tools")), *SMALL).read_until_ready()
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": schema}}]
    messages: Any = [{"role": "user", "content": "What's the weather in Paris?"}]
    with openai.OpenAI(base_url=ready["openai"], api_key="none", max_retries=0, timeout=60) as client:
        options: Any = {"model": "kiln-tiny-tools", "tools": tools, "temperature": 0}
        choice = client.chat.completions.create(messages=messages, **options).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


@pytest.mark.parametrize(
    ("written", "parser"),
    [
        ('<tool_call>\n{"name": "{{ call.function.name }}"}\n</tool_call>', "qwen"),
        ('[TOOL_CALLS] [{"name": "{{ call.function.name }}"}]', "mistral"),
        ("<tool_call>\n<function={{ call.function.name }}>", "qwen_xml"),
        ("<function={{ call.function.name }}>", None),
    ],
)
async def test_the_parser_of_calls_goes_by_what_a_template_writes(
    tmp_path: Path, written: str, parser: str | None
) -> None:
    loops = "{% for message in messages %}{% for call in message.tool_calls or [] %}", "{% endfor %}{% endfor %}"
    async with serve_runtime(tmp_path) as served, AsyncRuntime(served.address) as runtime:
        await served.deploy(chat_template=written.join(loops))
        assert await find_tool_call_parser(runtime, "d") == parser


async def test_a_bundle_without_templates_leaves_the_parser_to_the_gateway(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served, AsyncRuntime(served.address) as runtime:
        await served.deploy(chat_template=None)
        assert await find_tool_call_parser(runtime, "d") is None


def test_an_adapter_has_not_the_models_name(tmp_path: Path) -> None:
    words = [KILN, "serve", str(TINY), *_FREE, "--adapter", f"kiln-tiny={tmp_path}", "--home", str(tmp_path / "home")]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert refused.returncode == 2
    assert "--adapter kiln-tiny: the model itself has that name" in refused.stderr


def find_holders(pid: int) -> set[str]:
    """The modules or names of the processes below one that have credentials in their environment."""
    found = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if not _CREDENTIALS.keys().isdisjoint(child.environ())
    ]
    return {re.sub(r".* -m (\w+).*", r"\1", " ".join(child.cmdline())) for child in found}


@pytest.mark.slow
def test_nothing_leaves_this_host(serve: Callable[..., Serve], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    ready = serve(str(TINY), *SMALL, trace=trace).read_until_ready()
    assert ask(ready["openai"], "kiln-tiny")
    calls = [line for line in trace.read_text().splitlines() if "sa_family=" in line or "connect(" in line]
    assert any("127.0.0.1" in line for line in calls), "the trace has the calls"
    assert [line for line in calls if not is_within(line)] == []


def is_within(call: str) -> bool:
    """Whether a traced call is to a socket of this host, and asks no server for a name."""
    return (
        re.search(r'sa_family=AF_(UNIX|NETLINK)|"(::ffff:)?127\.|"::1"', call) is not None and "htons(53)" not in call
    )
