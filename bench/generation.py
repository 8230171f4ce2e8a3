"""`python -m bench.generation`: what sampling parameters, constraints and facts about prompts cost through gRPC.

All requests go to runtimes that take turns, with the same clients and the same random model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import truediv
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.checkpoint import write_checkpoint
from bench.formats import PLAIN
from bench.machine import describe_machine
from bench.measurements import Measurements
from bench.other_load import OtherLoad
from bench.plan import BARE, WORKLOADS, Workload, decode_bundle, prefill_bundle
from bench.run import MODEL, say
from bench.services import (
    DEPLOYMENT,
    Server,
    compile_bundle,
    deployed,
    measure_streams,
    running_server,
    running_services,
)
from bench.tables import Row, count_streams, render_table
from bench.worker import Worker, median
from execution.sampling import draw

#: No text that matches it ends within a measurement.
_SCHEMA: Final = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
_DRAWN: Final = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 7}
_PENALTIES: Final = {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "no_repeat_ngram_size": 4}
_CONSTRAINED: Final = _DRAWN | {"json_schema": json.dumps(_SCHEMA), "ignore_eos": False}
#: States of async scheduling.
_AHEAD: Final = "ahead"
_STEPWISE: Final = "stepwise"
#: Options of the runtimes that are measured, by their names.
RUNTIMES: Final = {_AHEAD: "--async-scheduling", _STEPWISE: "--no-async-scheduling"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one kind.

    Attributes:
        engine: Whose bundle they go to: executables of `BARE` pick tokens, and ranks those of rows with processors;
            those of "processors" pick these, too, and those of "host" none.
        runtime: A name of `RUNTIMES`.
        options: Of the requests, beside those of greedy answers of a length.
        reference: The case that the step's time is compared with.
        goal: The most times the reference's time that a step of 16 streams may take.
    """

    title: str
    engine: str = BARE
    runtime: str = _AHEAD
    options: Mapping[str, Any] = field(default_factory=dict)
    reference: str = "greedy"
    goal: float | None = None


#: A step that depends on the tokens before it cannot be called ahead, so it is compared with one that is not, either.
#: A constraint costs little, so its reference has the same bundle and server, too.
CASES: Final = {
    "greedy": Case(title="greedy"),
    "drawn": Case(title="drawn", options=_DRAWN),
    "stepwise": Case(title="greedy, no step called ahead", runtime=_STEPWISE),
    **{
        f"{engine}-{name}": Case(
            title=f"{title}, {where}", engine=engine, runtime=runtime, options=options, reference=of, goal=goal
        )
        for engine, where in ((BARE, "ranks"), ("processors", "executables"), ("host", "host"))
        for name, title, runtime, options, of, goal in (
            ("cut", "drawn, min_p and typical_p", _AHEAD, _DRAWN | {"min_p": 0.02, "typical_p": 0.9}, "drawn", None),
            ("penalties", "penalties", _AHEAD, _PENALTIES, "stepwise", None),
            ("drawn", "drawn, no step called ahead", _STEPWISE, _DRAWN, "drawn", None),
            ("constrained", "drawn, a JSON schema", _STEPWISE, _CONSTRAINED, f"{engine}-drawn", 1.03),
        )
    },
    "host": Case(title="greedy, host", engine="host", reference="stepwise"),
}
#: What a page says of its cases.
LEGEND: Final = (
    "Bundles are called\nby what applies processors: *ranks*, *executables*, or the *host*, which picks all tokens. "
    "*CPU* is of the front\nand the rank, not of the processes that find masks."
)
#: Log probabilities that are asked of prompts, by the engine whose bundle computes them.
_PROMPTS: Final = {
    "plain": (PLAIN, None),
    "idle": ("prompt-logprobs", None),
    "asked": ("prompt-logprobs", 0),
    "asked-20": ("prompt-logprobs", 20),
}
_PROMPT_TITLES: Final = {
    "plain": "a bundle without log probabilities of prompts",
    "idle": "a bundle with them, not asked for",
    "asked": "with each token's",
    "asked-20": "with each token's and 20 others",
}
_NUM_PROMPTS: Final = 5
#: Candidates of a row that is drawn: those of the default limit, and all of a vocabulary.
_CANDIDATES: Final = (256, 32_000)
_NUM_DRAWS: Final = 200
_INVERSE: Final = "inverse"
_NOISE: Final = "noise"


def plan_workloads(size: str) -> tuple[Workload, Workload]:
    """The workloads of streams and of prompts: models of 160 million parameters, or tiny ones."""
    base = replace(WORKLOADS[f"{size}-adapters-idle-served"], registered=0, prompts=())
    streams = replace(base, format=PLAIN, variants=("processors", "host"))
    prompts = replace(base, format=PLAIN, variants=("prompt-logprobs",), batches=(), prompts=(base.length * 4,))
    return streams, prompts


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=__doc__)
    parser.add_argument("--quick", action="store_const", const="tiny", default="160m", dest="size", help="tiny models")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-generation.md"))
    options = parser.parse_args()
    streams, prompts = plan_workloads(options.size)
    started_s, measured = time.monotonic(), Measurements()
    directory = Path(tempfile.mkdtemp(prefix="kiln-bench-"))
    try:
        write_checkpoint(directory / "models" / MODEL, streams)
        with contextlib.ExitStack() as stack:
            run = _Run(streams, prompts, directory, stack)
            for number in range(streams.rounds):
                say(f"round {number + 1} of {streams.rounds}")
                run.measure(measured)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    page = _render(measured, streams, prompts, time.monotonic() - started_s)
    options.output.write_text(page)
    print(page)


class _Run:
    """Both runtimes, the clients, and the bundles of both workloads."""

    def __init__(self, streams: Workload, prompts: Workload, work: Path, stack: contextlib.ExitStack) -> None:
        self._streams, self._prompts = streams, prompts
        self._services = stack.enter_context(running_services(work / "home", work / "models"))
        say("compiling")
        configs = streams.bundles | {f"prompts-{name}": config for name, config in prompts.bundles.items()}
        self._digests = {
            name: compile_bundle(self._services, name, config, MODEL).digest for name, config in configs.items()
        }
        self._servers: dict[str, Server] = {
            name: stack.enter_context(running_server(self._services, work / name, [option]))
            for name, option in RUNTIMES.items()
        }
        self._clients = stack.enter_context(Worker("bench.streams"))

    def measure(self, measured: Measurements) -> None:
        measured.begin_round()
        load = OtherLoad()
        for batch in self._streams.batches:
            for server, engine, cases in self._list_deployments():
                with deployed(self._servers[server], self._digests[decode_bundle(batch, engine)], 2):
                    for name in cases:
                        with measured.attempt(f"{CASES[name].title}, {count_streams(batch)}"):
                            self._measure_case(measured, name, batch)
        for name, (engine, count) in _PROMPTS.items():
            digest = self._digests[f"prompts-{prefill_bundle(BARE if engine == PLAIN else engine)}"]
            with measured.attempt(_PROMPT_TITLES[name]), deployed(self._servers[_AHEAD], digest, 2):
                options = {} if count is None else {"prompt_logprobs": count}
                call = {"tokens": self._prompts.prompts[0], "prompts": _NUM_PROMPTS, "options": options}
                address = self._servers[_AHEAD].runtime
                firsts = self._clients.call("prompts", address=address, deployment=DEPLOYMENT, **call)
                measured.add(f"prompt.{name}", median(firsts))
        _measure_draws(measured, self._streams.batches)
        shares = load.measure()
        measured.add("others", shares.others)
        measured.add("stolen", shares.stolen)

    def _list_deployments(self) -> Iterator[tuple[str, str, list[str]]]:
        """Each runtime and bundle with the cases that share them."""
        for runtime, engine in dict.fromkeys((case.runtime, case.engine) for case in CASES.values()):
            yield (
                runtime,
                engine,
                [name for name, case in CASES.items() if (case.runtime, case.engine) == (runtime, engine)],
            )

    def _measure_case(self, measured: Measurements, name: str, batch: int) -> None:
        case = CASES[name]
        answer = measure_streams(self._clients, self._servers[case.runtime], self._streams, batch, case.options)
        measured.add(f"{name}.{batch}", answer["step_s"])
        measured.add(f"{name}.{batch}.cpu", batch * (answer["front_cpu_s"] + answer["rank_cpu_s"]))


def _render(measured: Measurements, streams: Workload, prompts: Workload, duration_s: float) -> str:
    introduction = (
        f"# Generation\n\nWritten by `python -m bench.generation`, in {duration_s / 60:.0f} minutes: a random Llama of "
        f"{streams.name.partition('-')[0]} parameters, float32,\nvocabulary {streams.model['vocab_size']}, 2 threads, "
        f"through gRPC. Times are medians of {streams.rounds} rounds in which all took turns, ratios\nmedians of the "
        f"rounds' ratios. {LEGEND}\n\n"
        f"Machine: {describe_machine()}. Other processes took up to {measured.range('others')[1]:.0%} of it in a round."
    )
    parts = [introduction]
    head = ("requests", "time", "CPU", "times", "of", "CPU, times", "goal")
    for batch in streams.batches:
        rows = [_row(measured, name, batch) for name in CASES if measured.has(f"{name}.{batch}")]
        parts.append(f"## A step of {count_streams(batch)}\n\n" + render_table(head, rows))
    rows = [
        (
            title,
            f"{measured.typical(f'prompt.{name}') * 1e3:.1f} ms",
            f"{measured.relate(truediv, f'prompt.{name}', 'prompt.plain'):.2f}",
        )
        for name, title in _PROMPT_TITLES.items()
        if measured.has(f"prompt.{name}", "prompt.plain")
    ]
    parts.append(
        f"## The first token of a prompt of {prompts.prompts[0]} tokens\n\n"
        + render_table(("requests", "time", "times the first"), rows)
    )
    parts.append(_render_draws(measured, streams.batches))
    if measured.failures:
        failed: list[Row] = [(what, why[:300]) for what, why in measured.failures.items()]
        parts.append("## Failed\n\n" + render_table(("what", "why"), failed))
    return "\n\n".join(parts) + "\n"


def _measure_draws(measured: Measurements, batches: tuple[int, ...]) -> None:
    """Adds a round of the draws' seconds, compiled for this host as executables are."""
    compiled = torch.compile(draw, fullgraph=True, dynamic=False)
    for count, batch in _list_sizes(batches):
        ids = torch.arange(count, dtype=torch.int32).expand(batch, count).contiguous()
        scores = torch.linspace(0, -20, count).expand(batch, count).contiguous()
        sampling_params = torch.tensor([[0.0, 1.0, 1.0]]).repeat(batch, 1)
        chances = {_NOISE: torch.arange(2 * batch, dtype=torch.int32).view(batch, 2), _INVERSE: torch.rand(batch, 1)}
        for kind, chance in chances.items():
            arguments = (ids, scores, sampling_params, chance)
            compiled(*arguments)
            measured.add(f"{kind}.{count}.{batch}", median([_time(compiled, arguments) for _ in range(_NUM_DRAWS)]))


def _render_draws(measured: Measurements, batches: tuple[int, ...]) -> str:
    rows: list[Row] = []
    for count, batch in _list_sizes(batches):
        noise, inverse = (f"{kind}.{count}.{batch}" for kind in (_NOISE, _INVERSE))
        times = tuple(f"{measured.typical(name) * 1e6:.0f} µs" for name in (noise, inverse))
        rows.append((count_streams(batch), str(count), *times, f"{measured.relate(truediv, noise, inverse):.2f}"))
    head = ("rows", "candidates of each", "by noise", "by the inverse distribution function", "ratio")
    return "## The draw alone\n\n" + render_table(head, rows)


def _time(call: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> float:
    began_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began_s


def _list_sizes(batches: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return ((count, batch) for count in _CANDIDATES for batch in batches)


def _row(measured: Measurements, name: str, batch: int) -> Row:
    case, figure = CASES[name], f"{name}.{batch}"
    least, greatest = measured.range(figure)
    reference = f"{case.reference}.{batch}"
    ratios = [
        f"{measured.relate(truediv, figure + of, reference + of):.3f}" if measured.has(figure, reference) else "–"
        for of in ("", ".cpu")
    ]
    goal = "" if case.goal is None or batch == 1 else f"≤ {case.goal}"
    time_ms = f"{measured.typical(figure) * 1e3:.2f} ms ({least * 1e3:.2f}–{greatest * 1e3:.2f})"
    cpu_ms = f"{measured.typical(f'{figure}.cpu') * 1e3:.2f} ms"
    return (case.title, time_ms, cpu_ms, ratios[0], CASES[case.reference].title, ratios[1], goal)


if __name__ == "__main__":
    main()
