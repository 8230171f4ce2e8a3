"""The goals of the cpu target: figures of one run, each relative to a limit or a peer of the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import truediv
from typing import Final

from bench.limits import MULTIPLIERS
from bench.measurements import Measurements
from bench.peers import PEERS
from bench.plan import CHUNKS, LARGE, LARGE_DECODE, Workload
from bench.tables import count_streams
from bench.work import decode_work, prefill_work

#: Least share of the limit that one stream's decoding reaches: large models leave less time beside their weights.
_LEAST_DECODE_SHARE: Final = {LARGE.name: 0.9, LARGE_DECODE.name: 0.9}
#: Least rate of decoding, times OpenVINO's, by streams, and the rate that is aimed at.
_LEAST_DECODE: Final = {1: 1.0, 4: 1.05, 16: 1.0}
_AIMS: Final = {16: 1.2}


@dataclass(frozen=True)
class Goal:
    """A figure and the bound that it should meet.

    Attributes:
        figure: None if the run has none.
        at_least: Whether the figure may exceed it, or else be less.
        aim: A figure beyond the bound that is aimed at; None if there is none.
    """

    name: str
    figure: float | None
    goal: float
    at_least: bool = True
    aim: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether there is a figure that meets its bound."""
        if self.figure is None:
            return False
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal


def arithmetic_limit(measured: Measurements, workload: Workload) -> str:
    """Name of the limit of a workload's arithmetic: that of the fastest unit which can multiply its dtype."""
    names = [f"limit.{unit}" for unit in MULTIPLIERS[workload.dtype]]
    return max(filter(measured.has, names), key=measured.typical, default=names[0])


def share_of_limit(measured: Measurements, workload: Workload, parameters: int, name: str) -> float:
    """The least time that a step can take on this machine, as a share of what it took.

    `name` is ENGINE.decode.STREAMS or ENGINE.prefill.TOKENS; a step reads so many parameters.
    """
    _, action, size = name.split(".")
    describe = decode_work if action == "decode" else prefill_work
    work = describe(workload, parameters, int(size))
    names = (name, arithmetic_limit(measured, workload), "limit.read")
    return measured.relate(lambda step, rate, bandwidth: work.least_s(rate, bandwidth) / step, *names)


def list_goals(measured: Measurements, workload: Workload, parameters: int) -> list[Goal]:
    """The goals of one workload, also those for which the run has no figures."""
    rows = (
        *_decode_goals(measured, workload, parameters),
        *_prefill_goals(workload),
        *_service_goals(workload),
    )
    return [row.read(measured) for row in rows]


@dataclass(frozen=True, slots=True)
class _Row:
    title: str
    names: tuple[str, ...]
    combine: Callable[..., float]
    goal: float
    at_least: bool = True
    aim: float | None = None

    def read(self, measured: Measurements) -> Goal:
        figure = measured.relate(self.combine, *self.names) if measured.has(*self.names) else None
        return Goal(self.title, figure, self.goal, self.at_least, self.aim)


def _decode_goals(measured: Measurements, workload: Workload, parameters: int) -> Iterator[_Row]:
    work = decode_work(workload, parameters, 1)
    least = _LEAST_DECODE_SHARE.get(workload.name, 0.85)
    limits = ("bare.decode.1", arithmetic_limit(measured, workload), "limit.read")
    title = "decode, 1 stream, of the time that reading takes at the bandwidth"
    yield _Row(title, limits, lambda step, *rates: work.least_s(*rates) / step, least)
    for batch in workload.raced:
        for peer in PEERS:
            is_openvino = peer == "openvino"
            least, aim = (_LEAST_DECODE.get(batch, 1.0), _AIMS.get(batch)) if is_openvino else (1.0, None)
            yield _race(f"decode, {count_streams(batch)}", f"decode.{batch}", peer, least, aim)
    yield _Row("through gRPC, 1 stream, of bare", ("bare.decode.1", "served.decode.1"), truediv, 0.97)


def _prefill_goals(workload: Workload) -> Iterator[_Row]:
    for tokens in workload.prompts if workload.raced else ():
        for peer in PEERS:
            yield _race(f"prefill, {tokens} tokens", f"prefill.{tokens}", peer, 1.0)


def _service_goals(workload: Workload) -> Iterator[_Row]:
    paced = ("front.1", "raw.paced")
    yield _Row("front CPU a token, 1 stream, times a raw stream's at that pace", paced, truediv, 1.3, at_least=False)
    if 16 in workload.batches:
        title = "front CPU a token, 16 streams, raw writes"
        yield _Row(title, ("front.16", "raw"), truediv, 2.0, at_least=False)
    crowd = workload.crowd
    if crowd is not None:
        # A chunk through the services takes longer than a bare one by what a step does, see the goal for gRPC.
        names = (f"{CHUNKS}.on.crowded.99", f"{CHUNKS}.on.calm.99", "bare.chunk")
        title = f"a prompt of {crowd.prompt} among {count_streams(crowd.streams)}, p99 between tokens rises by chunks"
        yield _Row(title, names, lambda crowded, calm, chunk: (crowded - calm) / chunk, 1.03, at_least=False)
    yield _Row("LoadWeights pause, decode steps", ("pause", "bare.decode.1"), truediv, 1.0, at_least=False)


def _race(what: str, figure: str, peer: str, least: float, aim: float | None = None) -> _Row:
    names = (f"{peer}.{figure}", f"bare.{figure}")
    return _Row(f"{what}, rate times {PEERS[peer].title}", names, truediv, least, aim=aim)
