"""One run of a workload: the engines that it measures, and their figures."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from bench.checkpoint import SCALED
from bench.limits import Limits
from bench.measurements import Measurements, Reads
from bench.other_load import OtherLoad
from bench.peers import PEERS
from bench.plan import BARE, PREFILL, PREFIXES, SWAP, Workload, decode_bundle, prefill_bundle
from bench.profile import profile
from bench.services import compile_bundle, deployed, load_adapters, measure_streams, running_services, swap_weights
from bench.switches import SwitchedServers
from bench.tables import count_streams
from bench.worker import Worker
from execution.threads import thread_environment

#: Name of the checkpoint's directory.
MODEL: Final = "random"
#: A peer may convert and compile the model first.
_LOAD_TIMEOUT_S: Final = 1200.0
#: Messages of the raw stream that the front's time is compared to.
_RAW_MESSAGES: Final = 2000


class Run:
    """One run: the engines that it measures, and their figures."""

    def __init__(self, workload: Workload, work: Path, stack: contextlib.ExitStack, measured: Measurements) -> None:
        """Compiles, loads, and starts the engines; the stack ends them."""
        self.measured = measured
        self._workload = workload
        self._work = work
        self._stack = stack
        self._model = work / "models" / MODEL
        self._limits = Limits(work)
        self._services = stack.enter_context(running_services(work / "home", self._model.parent))
        self._digests = self._compile()
        if workload.is_served:
            self._measure_loads()
        # As in a rank: the same number of threads, which wait in the same way.
        self._bare = self._start("bench.bare", environment=thread_environment(workload.num_threads, num_ranks=1))
        digests = {name: digest for name, digest in self._digests.items() if name != PREFIXES}
        self._load_bare(digests)
        self._clients, self._raw = self._start("bench.streams"), self._start("bench.raw_stream")
        self._switched = SwitchedServers(
            workload=workload,
            services=self._services,
            digests=self._digests,
            clients=self._clients,
            work=work,
            stack=stack,
        )
        self._peers: dict[str, Worker] = {}
        measured.notes["Kiln"] = f"torch {torch.__version__}, {workload.dtype}, keys and values {workload.dtype}"

    def _measure_loads(self) -> None:
        for attempt in ("first", "again"):
            digest = next(iter(self._digests.values()))
            with deployed(self._services, digest, self._workload.num_threads) as load_s:
                self.measured.once[f"load.{attempt}"] = load_s

    def add_peer(self, name: str) -> None:
        """Starts a peer. If it does not work, the run leaves it out and the page says why."""
        peer, workload, measured = PEERS[name], self._workload, self.measured
        say(f"starting {name}")
        sizes = {"max_rows": max(workload.raced), "max_length": workload.length, "max_prompt": workload.prompts[-1]}
        worker = self._start(peer.module, python=str(peer.python))
        with measured.attempt(peer.title):
            options: dict[str, Any] = {"dtype": workload.dtype, "num_threads": workload.num_threads, **sizes}
            options |= {"weights": workload.peers[name]}
            note = worker.call("load", timeout_s=_LOAD_TIMEOUT_S, model=str(self._model), **options)
            worker.call("prefill", tokens=8, steps=1)
            measured.notes[name] = note
            self._peers[name] = worker

    def measure_round(self, number: int) -> None:
        """Measures every engine once, in turn, or in the rounds for it."""
        workload, measured = self._workload, self.measured
        measured.begin_round()
        load = OtherLoad()
        with measured.attempt("limits"):
            self._measure_limits()
        for batch in workload.batches:
            if workload.is_measured(number, takes_long=bool(workload.raced) and batch not in workload.raced):
                self._measure_decode(batch)
        for tokens in workload.prompts:
            if workload.is_measured(number, takes_long=tokens != workload.prompts[0]):
                self._measure_prefill(tokens)
        if workload.is_served:
            if workload.is_measured(number, takes_long=True):
                self._measure_switches()
            self._measure_raw_stream()
        shares = load.measure()
        measured.add("others", shares.others)
        measured.add("stolen", shares.stolen)

    def _measure_raw_stream(self) -> None:
        measured, workload = self.measured, self._workload
        with measured.attempt("raw stream"):
            measured.add("raw", self._raw.call("measure", tokens=_RAW_MESSAGES))
            interval_s = measured.this_round(f"served.decode.{workload.batches[0]}")
            measured.add("raw.paced", self._raw.call("measure", tokens=2 * workload.steps, interval_s=interval_s))

    def profile(self) -> None:
        """Samples what the processors do during steps."""
        workload = self._workload
        for batch in dict.fromkeys((workload.batches[0], workload.batches[-1])):
            options = {"position": workload.decode_position(batch), "steps": max(20, 150 // batch)}
            self._profile(f"decode, {count_streams(batch)}", "decode", name=decode_bundle(batch), **options)
        for tokens in dict.fromkeys((*workload.prompts[:1], *workload.prompts[-1:])):
            options = {"tokens": tokens, "steps": 3 * workload.count_prefills(tokens)}
            self._profile(f"prefill, {tokens} tokens", "prefill", name=PREFILL, **options)

    def _profile(self, what: str, action: str, **options: Any) -> None:
        with self.measured.attempt(f"profile of {what}"):
            self.measured.profiles[what] = profile(self._bare, self._work, action, **options)

    def _compile(self) -> dict[str, str]:
        say("compiling")
        once, digests = self.measured.once, {}
        for name, config in self._workload.bundles.items():
            # Only what lacks this bundle fails with it.
            with self.measured.attempt(f"bundle {name}"):
                model = MODEL + SCALED * self._workload.needs_scales(name)
                bundle = compile_bundle(self._services, name, config, model)
                once |= {f"lower.{name}.{tag}": seconds for tag, seconds in bundle.lowering_s.items()}
                once |= {f"compile.{name}": bundle.duration_s, f"compile.{name}.cpu": bundle.lowering_cpu_s}
                digests[name] = bundle.digest
        return digests

    def _load_bare(self, digests: Mapping[str, str]) -> None:
        say("loading")
        words = {"store": str(self._work / "home" / "store"), "num_threads": self._workload.num_threads}
        reads = self._bare.call("load", digests=digests, **words)
        for engine in self._workload.bare_engines:
            for batch in self._workload.batches:
                if (name := decode_bundle(batch, engine)) in reads:
                    self.measured.reads[engine] = Reads(**reads[name])

    def _measure_limits(self) -> None:
        add = self.measured.add
        for name, limit in self._limits.measure(1).items():
            add(f"limit.{name}.alone", limit.rate)
        for name, limit in self._limits.measure(self._workload.num_threads).items():
            add(f"limit.{name}", limit.rate)
            add(f"limit.{name}.thread", limit.thread_rate)

    def _measure_decode(self, batch: int) -> None:
        workload, measured, name = self._workload, self.measured, decode_bundle(batch)
        what = f"decode of {count_streams(batch)}"
        steps, position = workload.count_steps(batch), workload.decode_position(batch)
        for engine in workload.bare_engines:
            with measured.attempt(f"{what}, {engine}"):
                options = {
                    "position": position,
                    "steps": steps,
                    "num_adapters": workload.bare_engines[engine].num_adapters,
                }
                answer = self._bare.call("decode", name=decode_bundle(batch, engine), **options)
                measured.add_steps(f"{engine}.decode.{batch}", answer)
        if workload.bare_engines[BARE].num_adapters and batch == workload.batches[0]:
            with measured.attempt("another adapter in a slot"):
                measured.add_steps(SWAP, self._bare.call("swap", name=name, steps=steps))
        if workload.is_served:
            self._measure_deployed(what, batch, name)
        if batch in workload.raced:
            self._race(what, f"decode.{batch}", "decode", rows=batch, context=workload.context, steps=steps)

    def _measure_deployed(self, what: str, batch: int, name: str) -> None:
        workload, measured = self._workload, self.measured
        with (
            measured.attempt(f"{what}, through gRPC"),
            deployed(self._services, self._digests[name], workload.num_threads),
        ):
            step_s = self._measure_served(batch)
            if workload.registered:
                load_adapters(self._services, self._digests[name], self._model, workload.registered)
                again = measure_streams(self._clients, self._services, workload, batch)
                measured.add(f"registered.{batch}", again["step_s"] / step_s)
            if batch == workload.batches[0]:
                measured.add("pause", swap_weights(self._services, self._digests[name]))

    def _measure_served(self, batch: int) -> float:
        measured = self.measured
        answer = measure_streams(self._clients, self._services, self._workload, batch)
        measured.add(f"served.decode.{batch}", answer["step_s"])
        measured.add(f"served.decode.{batch}.cpu", batch * (answer["front_cpu_s"] + answer["rank_cpu_s"]))
        for process in ("front", "rank", "client"):
            measured.add(f"{process}.{batch}", answer[f"{process}_cpu_s"])
        measured.pool(f"first.{batch}", answer["firsts"])
        measured.pool(f"gap.{batch}", answer["gaps"])
        return float(answer["step_s"])

    def _measure_prefill(self, tokens: int) -> None:
        what, steps = f"prefill of {tokens} tokens", self._workload.count_prefills(tokens)
        for engine, format_ in self._workload.bare_engines.items():
            with self.measured.attempt(f"{what}, {engine}"):
                options = {"tokens": tokens, "steps": steps, "num_adapters": format_.num_adapters}
                answer = self._bare.call("prefill", name=prefill_bundle(engine), **options)
                self.measured.add_steps(f"{engine}.prefill.{tokens}", answer)
        self._race(what, f"prefill.{tokens}", "prefill", tokens=tokens, steps=steps)

    def _race(self, what: str, figure: str, action: str, **options: int) -> None:
        """Measures every peer; those whose process has ended run no further."""
        for name, worker in [*self._peers.items()]:
            with self.measured.attempt(f"{what}, {PEERS[name].title}"):
                self.measured.add_steps(f"{name}.{figure}", worker.call(action, **options))
            if not worker.is_running:
                del self._peers[name]

    def _measure_switches(self) -> None:
        crowd, measured = self._workload.crowd, self.measured
        if crowd is not None:
            with measured.attempt("the last chunk of a prompt, bare"):
                options = {"tokens": crowd.chunk, "steps": 3, "cached": crowd.prompt - crowd.chunk}
                measured.add_steps("bare.chunk", self._bare.call("prefill", name=PREFILL, **options))
        self._switched.measure(measured)

    def _start(
        self, module: str, *, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> Worker:
        return self._stack.enter_context(Worker(module, python=python, environment=environment))


def say(what: str) -> None:
    """Prints what the run does now."""
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
