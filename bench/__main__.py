"""`make bench`: measures all engines in turns and writes RESULTS.md; see the package."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.checkpoint import count_parameters, write_checkpoint
from bench.measurements import Measurements
from bench.peers import ENVIRONMENT
from bench.plan import FULL, QUICK, Plan
from bench.profile import profile
from bench.report import render
from bench.services import DEPLOYMENT, compile_bundles, deployed, running_services, swap_weights
from bench.worker import Worker, WorkerFailed, median
from execution.threads import thread_environment

RESULTS = Path(__file__).with_name("RESULTS.md")
MODEL = "random"
PEERS = ("openvino", "llama_cpp")
#: Messages of the raw stream that the front's time is compared to.
RAW_MESSAGES = 2000


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, not how fast")
    parser.add_argument("--no-peers", action="store_true", help="leave OpenVINO and llama.cpp out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the page to write")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    # If the run is told to end, it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        work = Path(directory)
        write_checkpoint(work / "models" / MODEL, plan)
        run = _Run(plan, work, stack)
        run.add_other("eager", "bench.eager")
        for peer in () if options.no_peers else PEERS:
            run.add_other(peer, f"bench.peers.{peer}", str(ENVIRONMENT / "bin" / "python"))
        for number in range(plan.rounds):
            _say(f"round {number + 1} of {plan.rounds}")
            run.measure_round()
        _say("profiling")
        run.profile(work)
        text = render(run.measured, plan, count_parameters(work / "models" / MODEL))
    options.output.write_text(text)
    print(text)


class _Run:
    """One run: the engines that it measures, and their figures."""

    def __init__(self, plan: Plan, work: Path, stack: contextlib.ExitStack) -> None:
        """Compiles, loads, and starts the engines; the stack ends them."""
        self.measured = Measurements()
        self._plan = plan
        self._stack = stack
        self._model = work / "models" / MODEL
        self._first = f"batch{plan.batches[0]}"
        self._services = stack.enter_context(running_services(work / "home", self._model.parent))
        _say("compiling")
        compiled = compile_bundles(self._services, plan, MODEL)
        for batch, bundle in compiled.items():
            self.measured.once |= {f"lower.{tag}, batch {batch}": s for tag, s in bundle.lowering_s.items()}
        self._digests = {f"batch{batch}": bundle.digest for batch, bundle in compiled.items()}
        _say("loading")
        for attempt in ("first", "again"):
            with deployed(self._services, self._digests[self._first], plan.num_threads) as load_s:
                self.measured.once[f"load.{attempt}"] = load_s
        # As in a rank: the same number of threads, which wait in the same way.
        self._bare = self._start("bench.bare", environment=thread_environment(plan.num_threads, num_ranks=1))
        store = str(work / "home" / "store")
        self._bare.call("load", store=store, digests=self._digests, num_threads=plan.num_threads)
        self._clients, self._raw = self._start("bench.streams"), self._start("bench.raw_stream")
        self._others: dict[str, Worker] = {}
        self.measured.notes["Kiln"] = f"torch {torch.__version__}, float32, keys and values float32"

    def add_other(self, name: str, module: str, python: str = sys.executable) -> None:
        """Starts another engine. If it is missing or does not work, the run leaves it out and the page says why."""
        if not Path(python).exists():
            self.measured.skipped[name] = "left out, not installed: `python -m bench.peers.install`"
            return
        _say(f"starting {name}")
        worker = self._start(module, python=python)
        try:
            note = worker.call("load", model=str(self._model), num_threads=self._plan.num_threads)
            worker.call("prefill", tokens=8, steps=1)
        except WorkerFailed as failure:
            self.measured.skipped[name] = f"left out, {failure}"
        else:
            self.measured.notes[name] = note
            self._others[name] = worker

    def measure_round(self) -> None:
        """Measures every engine once, in turn."""
        plan, add = self._plan, self.measured.add
        add("bandwidth", self._bare.call("bandwidth"))
        add("gemm", self._bare.call("gemm"))
        for batch in plan.batches:
            steps = max(8, plan.steps // batch)
            position = plan.context + steps // 2
            durations = self._bare.call("decode", name=f"batch{batch}", position=position, steps=steps)
            add(f"bare.decode.{batch}", median(durations))
            with deployed(self._services, self._digests[f"batch{batch}"], plan.num_threads):
                self._measure_served(batch, 2 * plan.steps)
                if batch == plan.batches[0]:
                    add("pause", swap_weights(self._services, self._digests[self._first]))
            for name, worker in self._others.items():
                durations = worker.call("decode", rows=batch, context=plan.context, steps=steps)
                add(f"{name}.decode.{batch}", median(durations))
        add("bare.prefill", median(self._bare.call("prefill", name=self._first, steps=5)))
        for name, worker in self._others.items():
            add(f"{name}.prefill", median(worker.call("prefill", tokens=plan.prompt_tokens, steps=5)))
        add("raw", self._raw.call("measure", tokens=RAW_MESSAGES))
        interval_s = self.measured.samples[f"served.decode.{plan.batches[0]}"][-1]
        add("raw.paced", self._raw.call("measure", tokens=2 * plan.steps, interval_s=interval_s))

    def profile(self, work: Path) -> None:
        """Samples what the processor does during steps."""
        plan = self._plan
        for batch in (plan.batches[0], plan.batches[-1]):
            options = {"name": f"batch{batch}", "position": plan.context + plan.steps, "steps": max(40, 150 // batch)}
            self.measured.profiles[f"decode, batch {batch}"] = profile(self._bare, work, "decode", **options)
        self.measured.profiles["prefill"] = profile(self._bare, work, "prefill", name=self._first, steps=15)

    def _measure_served(self, batch: int, tokens: int) -> None:
        answer = self._clients.call(
            "stream",
            address=self._services.runtime,
            deployment=DEPLOYMENT,
            streams=batch,
            context=self._plan.context,
            tokens=tokens,
            front=self._services.front.pid,
        )
        self.measured.add(f"served.decode.{batch}", answer["step_s"])
        self.measured.add(f"front.{batch}", answer["front_cpu_s"])

    def _start(
        self, module: str, *, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> Worker:
        return self._stack.enter_context(Worker(module, python=python, environment=environment))


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


if __name__ == "__main__":
    main()
