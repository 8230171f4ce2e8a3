"""The goals of the cpu target: figures of one run, each relative to a limit or a peer of the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from bench.measurements import Measurements
from bench.peers import PEERS
from bench.plan import Workload
from bench.tables import count_streams
from bench.work import decode_work, prefill_work

#: Least share of the limit that one stream's decoding reaches: large models leave less time beside their weights.
_LEAST_DECODE_SHARE: Final = {"160m-float32": 0.85, "160m-bfloat16": 0.85, "1b-bfloat16": 0.9}
#: Least rate of decoding, times OpenVINO's, by streams.
_LEAST_DECODE: Final = {1: 1.0, 4: 1.05, 16: 1.0}


@dataclass(frozen=True)
class Goal:
    """A figure and the bound that it should meet."""

    name: str
    figure: float
    goal: float
    at_least: bool = True

    @property
    def is_met(self) -> bool:
        """Whether the figure meets its bound."""
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal


def arithmetic_limit(measured: Measurements, workload: Workload) -> str:
    """Name of the unit that bounds a workload's arithmetic: that of its dtype, or the one of f32 if there is none."""
    name = f"limit.{workload.dtype}"
    return name if measured.has(name) else "limit.float32"


def share_of_limit(measured: Measurements, workload: Workload, parameters: int, name: str) -> float:
    """The least time that a step can take on this machine, as a share of what it took.

    Args:
        measured: The figures.
        workload: What was measured.
        parameters: Number of parameters that a step reads.
        name: ENGINE.decode.STREAMS or ENGINE.prefill.TOKENS.
    """
    _, action, size = name.split(".")
    describe = decode_work if action == "decode" else prefill_work
    work = describe(workload, parameters, int(size))
    names = (name, arithmetic_limit(measured, workload), "limit.read")
    return measured.relate(lambda step, rate, bandwidth: work.least_s(rate, bandwidth) / step, *names)


def list_goals(measured: Measurements, workload: Workload, parameters: int) -> list[Goal]:
    """The goals of one workload for which the run has figures."""
    rows = (*_decode_goals(measured, workload, parameters), *_prefill_goals(workload), *_service_goals())
    return [row.read(measured) for row in rows if all(map(measured.has, row.names))]


@dataclass(frozen=True, slots=True)
class _Row:
    """A goal and the figures that it is made of."""

    title: str
    names: tuple[str, ...]
    combine: Callable[..., float]
    goal: float
    at_least: bool = True

    def read(self, measured: Measurements) -> Goal:
        return Goal(self.title, measured.relate(self.combine, *self.names), self.goal, self.at_least)


def _decode_goals(measured: Measurements, workload: Workload, parameters: int) -> Iterator[_Row]:
    work = decode_work(workload, parameters, 1)
    least = _LEAST_DECODE_SHARE.get(workload.name, 0.85)
    limits = ("bare.decode.1", arithmetic_limit(measured, workload), "limit.read")
    yield _Row("decode, 1 stream, of the limit", limits, lambda step, *rates: work.least_s(*rates) / step, least)
    for batch in workload.batches:
        for peer in PEERS:
            least = _LEAST_DECODE.get(batch, 1.0) if peer == "openvino" else 1.0
            yield _race(f"decode, {count_streams(batch)}", f"decode.{batch}", peer, least)
    yield _Row("through gRPC, 1 stream, of bare", ("bare.decode.1", "served.decode.1"), _divide, 0.97)


def _prefill_goals(workload: Workload) -> Iterator[_Row]:
    for tokens in workload.prompts:
        for peer in PEERS:
            yield _race(f"prefill, {tokens} tokens", f"prefill.{tokens}", peer, 1.0)


def _service_goals() -> Iterator[_Row]:
    paced = ("front.1", "raw.paced")
    yield _Row("front CPU a token, 1 stream, times a raw stream's at that pace", paced, _divide, 1.3, at_least=False)
    yield _Row("front CPU a token, 16 streams, raw writes", ("front.16", "raw"), _divide, 2.0, at_least=False)
    yield _Row("LoadWeights pause, decode steps", ("pause", "bare.decode.1"), _divide, 1.0, at_least=False)


def _race(what: str, figure: str, peer: str, least: float) -> _Row:
    return _Row(f"{what}, rate times {PEERS[peer].title}", (f"{peer}.{figure}", f"bare.{figure}"), _divide, least)


def _divide(one: float, other: float) -> float:
    return one / other
