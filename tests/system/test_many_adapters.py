"""Many adapters on one deployment: what clients get is what the model gives that each adapter is part of."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kiln_client import Compiler, Runtime
from kiln_client.errors import Aborted, NotFound, Unavailable

from edge.access.issuer import Issuer
from tests.checkpoints.adapters import make_adapter
from tests.checkpoints.tiny_models import TinyModel, draw_tokens, write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.parity.reference import Continuation, Reference, assert_same_tokens
from tests.servers.stack import Stack
from tests.servers.tokens import make_claims

GEOMETRY = GEOMETRIES["gqa4-tied-llama3"]
SLOTS = 4
CONFIG = {
    "neuron_config": {
        "tp_degree": 2,
        "torch_dtype": "float32",
        "seq_len": 64,
        "max_context_length": 32,
        "batch_size": 8,
        "ctx_batch_size": 1,
        "enable_bucketing": False,
        "is_continuous_batching": True,
        "on_device_sampling_config": {"dynamic": True},
        "lora_config": {"max_loras": SLOTS, "max_lora_rank": 4, "max_cpu_loras": 16},
    }
}
PROMPT = draw_tokens(20, seed=5)
NUM_TOKENS = 12
NUM_CLIENTS = 32
#: Seconds after a kill in which requests may fail.
RECOVERY_S = 30.0


@dataclass
class Site:
    """A deployment with adapters, and what each of them should give."""

    stack: Stack
    expected: dict[str, Continuation] = field(default_factory=dict)

    def shard(self, tiny: TinyModel, path: Path, name: str, seed: int) -> None:
        """Makes an adapter, and a bundle of it."""
        reference = Reference(path, make_adapter(tiny, path, seed=seed))
        self.expected[name] = reference.greedy(PROMPT, NUM_TOKENS)
        with Compiler(self.stack.compiler, token=self.stack.token) as compiler:
            compiler.shard_adapter(name, str(path), "adapted")

    def client(self, subject: str = "") -> Runtime:
        """A client of the home's own principal, or of a tenant."""
        if not subject:
            return Runtime(self.stack.runtime, token=self.stack.token)
        token = Issuer(self.stack.home / "auth").sign(make_claims("infer load", sub=subject))
        return Runtime(self.stack.runtime, token=token)

    def check(self, runtime: Runtime, name: str) -> list[float]:
        """Checks the tokens of an adapter; gives the seconds between two of them."""
        tokens, times_s = [], []
        options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "adapter": name}
        with runtime.generate("adapted", PROMPT, **options) as events:
            for event in events:
                tokens += [token.id for token in event.delta.tokens]
                if event.delta.tokens:
                    times_s.append(time.monotonic())
        assert_same_tokens(tokens, self.expected[name])
        return [after - before for before, after in itertools.pairwise(times_s)]


@pytest.fixture(scope="module")
def tiny(stack: Stack) -> TinyModel:
    return write_tiny_model(stack.new_model("adapted"), GEOMETRY)


@pytest.fixture(scope="module")
def site(stack: Stack, tiny: TinyModel) -> Iterator[Site]:
    stack.provide("adapted", tiny.checkpoint.path, CONFIG)
    site = Site(stack)
    site.expected[""] = Reference(tiny.checkpoint.path, tiny.model).greedy(PROMPT, NUM_TOKENS)
    with stack.deployed("adapted"):
        yield site
    # They are given back behind the answer, one after the other.
    wait_until(lambda: not stack.list_leases())


def add_adapters(site: Site, tiny: TinyModel, numbers: range) -> list[str]:
    """Makes adapters, of which any two give other texts, and loads them."""
    names = [f"adapter-{number}" for number in numbers]
    with site.client() as runtime:
        for number, name in zip(numbers, names, strict=True):
            site.shard(tiny, site.stack.new_model(name), name, seed=number)
            runtime.load_adapter("adapted", name)
    texts = {tuple(site.expected[name].tokens) for name in names}
    assert len(texts) == len(names), "adapters that can be told apart"
    return names


def check_tenant(site: Site, name: str) -> None:
    """Checks that another principal neither sees nor uses an adapter."""
    with site.client("mallory") as tenant:
        assert [one.name for one in tenant.list_adapters("adapted").adapters] == []
        with pytest.raises(NotFound):
            tenant.complete("adapted", PROMPT, max_new_tokens=1, adapter=name)
        with pytest.raises(NotFound):
            tenant.unload_adapter("adapted", name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_adapters_go_through_4_slots_for_3_minutes(site: Site, tiny: TinyModel) -> None:
    """With a rank that is killed in the middle."""
    names = [*add_adapters(site, tiny, range(1000, 1200)), ""]
    end_s = time.monotonic() + 180
    killed_s = [end_s]
    counts = itertools.count()
    gaps_s: list[float] = []

    def check(seed: int) -> None:
        choices = random.Random(seed)
        with site.client() as runtime:
            while time.monotonic() < end_s:
                start_s = time.monotonic()
                try:
                    gaps = site.check(runtime, choices.choice(names))
                except (Unavailable, Aborted):
                    if not start_s - RECOVERY_S < killed_s[0] < time.monotonic():
                        raise
                else:
                    next(counts)
                    if not killed_s[0] - RECOVERY_S < start_s < killed_s[0] + RECOVERY_S:
                        gaps_s.extend(gaps)

    def kill() -> None:
        killed_s[0] = time.monotonic()
        min(site.stack.ranks(), key=lambda rank: rank.pid).kill()

    check_tenant(site, names[0])
    timer = threading.Timer(90, kill)
    timer.start()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for done in [pool.submit(check, seed) for seed in range(NUM_CLIENTS)]:
            done.result()
    timer.join()
    count, gaps_s = next(counts), sorted(gaps_s)
    median_s, most_s = gaps_s[len(gaps_s) // 2], gaps_s[len(gaps_s) * 999 // 1000]
    figures = f"{count} texts; between two tokens p50 {median_s:.4f} s, p99.9 {most_s:.4f} s, max {gaps_s[-1]:.4f} s"
    sys.stdout.write(f"{figures}\n")
    # Each adapter has several turns, on a slow host, too.
    assert count > 5 * 200
    # A step of tokens, one of a prompt and a copy, with time for the clients of this process.
    assert most_s < 20 * median_s
    with site.client() as runtime:
        assert len(runtime.list_adapters("adapted").adapters) == 200


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.05)
