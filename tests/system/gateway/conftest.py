"""Two runtimes that serve one bundle, and SMG in front of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import openai
import pytest

from tests.servers.gateway import FAST_RECOVERY, get_json, run_gateway
from tests.servers.hub import Hub, running_hub
from tests.servers.stack import Stack
from tests.system.conftest import TINY
from tests.system.runtime_process import SMALL_CONFIG, RuntimeProcess, run_runtime, wait_until

#: Id of the deployment in every runtime, by which clients of the gateway ask for the model.
MODEL = "tale"
MESSAGES: list[Any] = [{"role": "user", "content": "Once upon a time"}]


@dataclass
class Load:
    """What clients saw who asked one question after the other, without ever repeating one that failed."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fleet:
    """Runtimes, the URL of the gateway in front of them, and what the gateway takes for the Hub."""

    url: str
    runtimes: Sequence[RuntimeProcess]
    hub: Hub

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def wait_until_routed(self, runtime: RuntimeProcess) -> None:
        """Waits until the gateway routes to a runtime; under load only."""
        steps = runtime.get(MODEL).load.steps
        wait_until(lambda: bool(runtime.get(MODEL).load.steps > steps))

    def wait_until_whole(self) -> None:
        """Waits until the gateway calls every runtime ready."""

        def is_whole() -> bool:
            return all(worker["status"] == "ready" for worker in get_json(f"{self.url}/workers")["workers"])

        wait_until(is_whole)

    @contextmanager
    def under_load(self, *, num_clients: int = 4) -> Iterator[Load]:
        """Clients that ask for short answers until the block ends, by turns at once and as streams."""
        load, stop = Load(), Event()

        def ask(client: openai.OpenAI, *, stream: bool) -> None:
            started_s = time.monotonic()
            try:
                load.texts.append(answer(client, stream=stream, max_tokens=16, temperature=0))
            except openai.APIError as error:
                load.failures.append(repr(error))
            load.seconds.append(time.monotonic() - started_s)

        def ask_on(number: int) -> None:
            with self.client() as client:
                while not stop.is_set():
                    number += 1
                    ask(client, stream=number % 2 == 0)

        with ThreadPoolExecutor(num_clients) as pool:
            asking: list[Future[None]] = [pool.submit(ask_on, number) for number in range(num_clients)]
            try:
                yield load
            finally:
                stop.set()
        for one in asking:
            one.result()


def answer(client: openai.OpenAI, *, stream: bool, **options: Any) -> str:
    """The answer to MESSAGES, whole or from a stream's parts."""
    completions = client.chat.completions
    if not stream:
        return str(completions.create(model=MODEL, messages=MESSAGES, **options).choices[0].message.content)
    chunks = completions.create(model=MODEL, messages=MESSAGES, stream=True, **options)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


@pytest.fixture(scope="module")
def fleet(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    story = stack.provide("gateway-story", TINY, SMALL_CONFIG)
    directory = tmp_path_factory.mktemp("fleet")
    with run_runtime(stack.compiler, directory / "1") as first, run_runtime(stack.compiler, directory / "2") as second:
        for runtime in (first, second):
            runtime.load(story, MODEL, threads_per_core=1)
        addresses = [first.address, second.address]
        options = ("--policy", "round_robin", *FAST_RECOVERY)
        with running_hub() as hub, run_gateway(directory, addresses, *options, HF_ENDPOINT=hub.url) as url:
            yield Fleet(url, (first, second), hub)
