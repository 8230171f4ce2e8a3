"""One run of a workload: the engines that it measures, and their figures."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from bench.limits import Limits
from bench.measurements import Measurements
from bench.other_load import OtherLoad
from bench.peers import PEERS
from bench.plan import PREFILL, Workload, decode_bundle
from bench.profile import profile
from bench.services import DEPLOYMENT, compile_bundles, deployed, running_services, swap_weights
from bench.tables import count_streams
from bench.worker import Worker, WorkerFailed
from execution.threads import thread_environment

#: Name of the checkpoint's directory.
MODEL: Final = "random"
#: Messages of the raw stream that the front's time is compared to.
_RAW_MESSAGES: Final = 2000


class Run:
    """One run: the engines that it measures, and their figures."""

    def __init__(self, workload: Workload, work: Path, stack: contextlib.ExitStack) -> None:
        """Compiles, loads, and starts the engines; the stack ends them.

        Args:
            workload: What is measured.
            work: Directory with `models/random`; takes everything else.
            stack: Ends what the run starts.
        """
        self.measured = Measurements()
        self._workload = workload
        self._work = work
        self._stack = stack
        self._model = work / "models" / MODEL
        self._limits = Limits(work)
        self._services = stack.enter_context(running_services(work / "home", self._model.parent))
        say("compiling")
        compiled = compile_bundles(self._services, workload.bundles, MODEL)
        for name, bundle in compiled.items():
            self.measured.once |= {f"lower.{name}.{tag}": seconds for tag, seconds in bundle.lowering_s.items()}
            self.measured.once |= {f"compile.{name}": bundle.duration_s, f"compile.{name}.cpu": bundle.lowering_cpu_s}
        self._digests = {name: bundle.digest for name, bundle in compiled.items()}
        say("loading")
        for attempt in ("first", "again"):
            with deployed(self._services, self._digests[PREFILL], workload.num_threads) as load_s:
                self.measured.once[f"load.{attempt}"] = load_s
        # As in a rank: the same number of threads, which wait in the same way.
        self._bare = self._start("bench.bare", environment=thread_environment(workload.num_threads, num_ranks=1))
        store = str(work / "home" / "store")
        self._bare.call("load", store=store, digests=self._digests, num_threads=workload.num_threads)
        self._clients, self._raw = self._start("bench.streams"), self._start("bench.raw_stream")
        self._peers: dict[str, Worker] = {}
        self.measured.notes["Kiln"] = f"torch {torch.__version__}, {workload.dtype}, keys and values {workload.dtype}"

    def add_peer(self, name: str) -> None:
        """Starts a peer. If it is missing or does not work, the run leaves it out and the page says why."""
        peer = PEERS[name]
        if not peer.python.exists():
            self.measured.skipped[name] = "left out, not installed: `python -m bench.peers.install`"
            return
        say(f"starting {name}")
        workload = self._workload
        sizes = {"max_rows": max(workload.batches), "max_length": workload.length, "max_prompt": workload.prompts[-1]}
        worker = self._start(peer.module, python=str(peer.python))
        try:
            options: dict[str, Any] = {"dtype": workload.dtype, "num_threads": workload.num_threads, **sizes}
            note = worker.call("load", model=str(self._model), **options)
            worker.call("prefill", tokens=8, steps=1)
        except WorkerFailed as failure:
            self.measured.skipped[name] = f"left out, {failure}"
        else:
            self.measured.notes[name] = note
            self._peers[name] = worker

    def measure_round(self) -> None:
        """Measures every engine once, in turn."""
        workload, add = self._workload, self.measured.add
        load = OtherLoad()
        self._measure_limits()
        for batch in workload.batches:
            self._measure_decode(batch)
        for tokens in workload.prompts:
            steps = workload.count_prefills(tokens)
            answer = self._bare.call("prefill", name=PREFILL, tokens=tokens, steps=steps)
            self.measured.add_steps(f"bare.prefill.{tokens}", answer)
            for name, worker in self._peers.items():
                self.measured.add_steps(f"{name}.prefill.{tokens}", worker.call("prefill", tokens=tokens, steps=steps))
        add("raw", self._raw.call("measure", tokens=_RAW_MESSAGES))
        interval_s = self.measured.samples[f"served.decode.{workload.batches[0]}"][-1]
        add("raw.paced", self._raw.call("measure", tokens=2 * workload.steps, interval_s=interval_s))
        shares = load.measure()
        add("others", shares.others)
        add("stolen", shares.stolen)

    def profile(self) -> None:
        """Samples what the processors do during steps."""
        workload, profiles = self._workload, self.measured.profiles
        for batch in (workload.batches[0], workload.batches[-1]):
            options = {"position": workload.decode_position(batch), "steps": max(20, 150 // batch)}
            name = decode_bundle(batch)
            profiles[f"decode, {count_streams(batch)}"] = profile(
                self._bare, self._work, "decode", name=name, **options
            )
        for tokens in (workload.prompts[0], workload.prompts[-1]):
            options = {"tokens": tokens, "steps": 3 * workload.count_prefills(tokens)}
            profiles[f"prefill, {tokens} tokens"] = profile(self._bare, self._work, "prefill", name=PREFILL, **options)

    def _measure_limits(self) -> None:
        add = self.measured.add
        for name, limit in self._limits.measure(1).items():
            add(f"limit.{name}.alone", limit.rate)
        for name, limit in self._limits.measure(self._workload.num_threads).items():
            add(f"limit.{name}", limit.rate)
            add(f"limit.{name}.thread", limit.thread_rate)

    def _measure_decode(self, batch: int) -> None:
        workload, name = self._workload, decode_bundle(batch)
        steps, position = workload.count_steps(batch), workload.decode_position(batch)
        answer = self._bare.call("decode", name=name, position=position, steps=steps)
        self.measured.add_steps(f"bare.decode.{batch}", answer)
        with deployed(self._services, self._digests[name], workload.num_threads):
            self._measure_served(batch)
            if batch == workload.batches[0]:
                self.measured.add("pause", swap_weights(self._services, self._digests[name]))
        for peer, worker in self._peers.items():
            answer = worker.call("decode", rows=batch, context=workload.context, steps=steps)
            self.measured.add_steps(f"{peer}.decode.{batch}", answer)

    def _measure_served(self, batch: int) -> None:
        services, measured = self._services, self.measured
        answer = self._clients.call(
            "stream",
            address=services.runtime,
            deployment=DEPLOYMENT,
            streams=batch,
            context=self._workload.context,
            tokens=self._workload.count_tokens(batch),
            processes={"front": services.front.pid, "rank": services.find_rank().pid},
        )
        measured.add(f"served.decode.{batch}", answer["step_s"])
        measured.add(f"served.decode.{batch}.cpu", batch * (answer["front_cpu_s"] + answer["rank_cpu_s"]))
        measured.add(f"front.{batch}", answer["front_cpu_s"])
        measured.pool(f"first.{batch}", answer["firsts"])
        measured.pool(f"gap.{batch}", answer["gaps"])

    def _start(
        self, module: str, *, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> Worker:
        return self._stack.enter_context(Worker(module, python=python, environment=environment))


def say(what: str) -> None:
    """Prints what the run does now."""
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
