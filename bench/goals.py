"""The goals of the cpu target: figures of one run, each relative to a limit or a peer of the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import truediv
from typing import Final

from bench.formats import FORMATS, PLAIN
from bench.limits import MULTIPLIERS
from bench.measurements import Measurements
from bench.peers import PEERS
from bench.plan import BARE, CHUNKS, LARGE, LARGE_DECODE, SWAP, Workload
from bench.tables import count_streams
from bench.work import decode_work, prefill_work

#: Least share of the limit that one stream's decoding reaches: large models leave less time beside their weights.
_LEAST_DECODE_SHARE: Final = {LARGE.name: 0.9, LARGE_DECODE.name: 0.9}
#: The same by format, of its own bytes. Other formats have no such goal.
_LEAST_FORMAT_SHARE: Final = {PLAIN: 0.85, "int8": 0.85}
#: Least rate through gRPC, as a share of the bare executable's, in quantized formats, whose steps are short.
_LEAST_SERVED_SHARE: Final = 0.85
#: Most time that an adapter of each row adds to a step, as a share of the step's without.
_MAX_ADAPTER_COST: Final = 0.05
#: Least rate of decoding, times OpenVINO's, by streams, and the rate that is aimed at.
_LEAST_DECODE: Final = {1: 1.0, 4: 1.05, 16: 1.0}
_AIMS: Final = {16: 1.2}


@dataclass(frozen=True, slots=True)
class _Race:
    """Least rates of a format, times that of the better peer: of decoding by streams, and of any prompt."""

    decode: Mapping[int, float]
    prefill: float | None = None


_RACES: Final = {
    "int8": _Race({1: 1.0, 16: 1.2}, prefill=1.2),
    "int4": _Race({1: 1.0}),
    "adapters": _Race({1: 1.0, 16: 1.0}),
}


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The least rate of one of Kiln's formats, times that of another one of the same run, in some figures."""

    format: str
    other: str
    figures: tuple[str, ...]
    least: float


_COMPARISONS: Final = (
    _Comparison("float16", "bfloat16", ("decode.1", "decode.4"), 0.9),
    _Comparison("float16", BARE, ("decode.16", "prefill.128", "prefill.512"), 1.0),
    _Comparison("int8-cache", BARE, ("decode.16",), 1.5),
    _Comparison(BARE, PLAIN, ("decode.1", "decode.16"), 1 / (1 + _MAX_ADAPTER_COST)),
    _Comparison("adapters-idle", PLAIN, ("decode.1", "decode.16"), 0.99),
)


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


def arithmetic_limit(measured: Measurements, workload: Workload, engine: str = BARE) -> str:
    """Name of the limit of an engine's arithmetic: that of the fastest unit which can multiply its dtype."""
    names = [f"limit.{unit}" for unit in MULTIPLIERS[workload.find_dtype(engine)]]
    return max(filter(measured.has, names), key=measured.typical, default=names[0])


def share_of_limit(measured: Measurements, workload: Workload, parameters: int, name: str) -> float | None:
    """The least time that a step can take on this machine, as a share of what it took; None if the run has no figures.

    `name` is ENGINE.decode.STREAMS or ENGINE.prefill.TOKENS; a step multiplies so many parameters. What a peer's step
    must read is what ours reads in the same format.
    """
    engine, action, size = name.split(".")
    reads = measured.reads.get(engine, measured.reads.get(BARE))
    names = (name, arithmetic_limit(measured, workload, engine), "limit.read")
    if reads is None or not measured.has(*names):
        return None
    describe = decode_work if action == "decode" else prefill_work
    work = describe(workload, parameters, reads, int(size))
    return measured.relate(lambda step, rate, bandwidth: work.least_s(rate, bandwidth) / step, *names)


def list_goals(measured: Measurements, workload: Workload, parameters: int) -> list[Goal]:
    """The goals of one workload, also those for which the run has no figures."""
    rows = (
        *_race_goals(workload),
        *_format_goals(measured, workload),
        *_comparison_goals(workload),
        *_swap_goals(workload),
        *(_service_goals(workload) if workload.is_served else ()),
    )
    return [*_share_goals(measured, workload, parameters), *(row.read(measured) for row in rows)]


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


def _share_goals(measured: Measurements, workload: Workload, parameters: int) -> Iterator[Goal]:
    least = _LEAST_DECODE_SHARE.get(workload.name, _LEAST_FORMAT_SHARE.get(workload.format))
    if least is not None and 1 in workload.batches:
        share = share_of_limit(measured, workload, parameters, f"{BARE}.decode.1")
        yield Goal("decode, 1 stream, of the time that reading takes at the bandwidth", share, least)


def _race_goals(workload: Workload) -> Iterator[_Row]:
    """Of plain weights, beside each peer."""
    if workload.format != PLAIN:
        return
    for batch in workload.raced:
        for peer in workload.peers:
            is_openvino = peer == "openvino"
            least, aim = (_LEAST_DECODE.get(batch, 1.0), _AIMS.get(batch)) if is_openvino else (1.0, None)
            yield _race(f"decode.{batch}", peer, least, aim)
    for tokens in workload.prompts:
        for peer in workload.peers:
            yield _race(f"prefill.{tokens}", peer, 1.0)


def _format_goals(measured: Measurements, workload: Workload) -> Iterator[_Row]:
    """Of another format, beside the better of the peers that the run has."""
    race = _RACES.get(workload.format, _Race({}))
    bounds = {f"decode.{batch}": least for batch, least in race.decode.items() if batch in workload.raced}
    bounds |= {f"prefill.{tokens}": race.prefill for tokens in workload.prompts if race.prefill is not None}
    for figure, least in bounds.items():
        peers = [f"{peer}.{figure}" for peer in workload.peers]
        names = (f"{BARE}.{figure}", *([peer for peer in peers if measured.has(peer)] or peers))
        title = f"{_describe(figure)}, rate times the better peer's"
        yield _Row(title, names, lambda own, *others: min(others) / own, least)


def _comparison_goals(workload: Workload) -> Iterator[_Row]:
    """Of formats of Kiln's own."""
    engines = workload.bare_engines
    measured = {*(f"decode.{batch}" for batch in workload.batches), *(f"prefill.{one}" for one in workload.prompts)}
    for one in _COMPARISONS:
        if one.format in engines and one.other in engines:
            for figure in filter(measured.__contains__, one.figures):
                rate, other = _name_format(one.format, workload), _name_format(one.other, workload)
                title = f"{_describe(figure)}, rate of {rate} times that of {other}"
                yield _Row(title, (f"{one.other}.{figure}", f"{one.format}.{figure}"), truediv, one.least)


def _name_format(engine: str, workload: Workload) -> str:
    if engine != BARE:
        return engine
    return workload.dtype if workload.format == PLAIN else workload.format


def _swap_goals(workload: Workload) -> Iterator[_Row]:
    """Of the adapters of a format."""
    if FORMATS[workload.format].num_adapters:
        names = (SWAP, f"{BARE}.decode.{workload.batches[0]}")
        yield _Row("another adapter in a slot, decode steps", names, truediv, 1.0, at_least=False)


def _service_goals(workload: Workload) -> Iterator[_Row]:
    if workload.format != PLAIN:
        for batch in workload.batches if workload.registered else ():
            title = f"through gRPC, {count_streams(batch)}, beside {workload.registered} adapters, times without"
            yield _Row(title, (f"registered.{batch}",), float, 1.01, at_least=False)
        for batch in workload.batches:
            names = (f"bare.decode.{batch}", f"served.decode.{batch}")
            yield _Row(f"through gRPC, {count_streams(batch)}, of bare", names, truediv, _LEAST_SERVED_SHARE)
        return
    yield _Row("through gRPC, 1 stream, of bare", ("bare.decode.1", "served.decode.1"), truediv, 0.97)
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


def _race(figure: str, peer: str, least: float, aim: float | None = None) -> _Row:
    names = (f"{peer}.{figure}", f"{BARE}.{figure}")
    return _Row(f"{_describe(figure)}, rate times {PEERS[peer].title}", names, truediv, least, aim=aim)


def _describe(figure: str) -> str:
    """Says what `decode.STREAMS` or `prefill.TOKENS` is."""
    action, size = figure.split(".")
    return f"{action}, {count_streams(int(size)) if action == 'decode' else f'{size} tokens'}"
