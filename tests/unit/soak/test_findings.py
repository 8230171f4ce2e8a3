"""What a soak would find: each check on a run that has the fault, and on one that has not."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.soak.census import Census, take_census
from tests.soak.clients import BEHAVIOURS
from tests.soak.faults import FAULTS
from tests.soak.memory import MAX_GROWTH_MB, fit_slope
from tests.soak.operations import OPERATIONS
from tests.soak.references import MAX_ANSWER, References
from tests.soak.soak import find_stalls
from tests.soak.streams import Stream
from tests.soak.windows import RANKS_LOST, SUSPECTED, Windows
from tests.soak.witness import explain, summarize

STORY, PIRATE = [*range(MAX_ANSWER)], [*range(500, 500 + MAX_ANSWER)]


@pytest.fixture
def references() -> References:
    """Epoch 1 tells the story, epoch 2 is the pirate's."""
    references = References()
    for epoch, (digest, answer) in enumerate({"story": STORY, "pirate": PIRATE}.items(), start=1):
        references.add(digest, "text", answer)
        references.note_epoch("d", epoch, digest)
    return references


@pytest.mark.parametrize(
    ("tokens", "mistake"),
    [
        ([], None),
        ([(1, token) for token in STORY[:7]], None),
        ([(2, token) for token in PIRATE], None),
        # What an answer goes on with under other weights has no reference.
        ([(1, 0), (1, 1), (2, 77)], None),
        ([(1, 0), (1, 9)], "token 1 of epoch 1 is 9, and the reference has 1"),
        ([(2, 0)], "token 0 of epoch 2 is 0, and the reference has 500"),
        ([(1, 0), (1, 9), (2, 77)], "token 1 of epoch 1 is 9, and the reference has 1"),
        ([(2, 500), (1, 0)], "its epochs go back"),
        ([(3, 0)], "the runtime never named the weights of its epoch 3"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_answers(references: References, tokens: list[tuple[int, int]], mistake: str | None) -> None:
    assert references.find_mistake("d", "text", tokens) == mistake
    assert references.knows("d", tokens) == (tokens[:1] != [(3, 0)])


def make_stream(
    kinds: str, code: str = "OK", reason: str = "", *, num_tokens: int = 2, has_left: bool = False, sequences: int = 1
) -> Stream:
    """A stream of two tokens; a, d and f stand for the kinds of its events, capitals for those of a second sequence."""
    names = {"a": "accepted", "d": "delta", "f": "finished"}
    stream = Stream("read", "d", "text", 2, frozenset(), sequences, code=code, reason=reason, has_left=has_left)
    stream.kinds = [(names[kind.lower()], int(kind.isupper())) for kind in kinds]
    stream.numbers = [*range(len(kinds))]
    stream.answers |= {index: [(1, token) for token in range(num_tokens)] for index in range(sequences)}
    return stream


WITHOUT_TERMINAL = "it ended UNAVAILABLE RANK_DIED without a terminal event"


@pytest.mark.parametrize(
    ("stream", "faults"),
    [
        (make_stream("addf"), []),
        (make_stream("", "INVALID_ARGUMENT", "REQUEST_INVALID"), []),
        (make_stream("adf", "UNAVAILABLE", "RANK_DIED"), []),
        (make_stream("ad", "CANCELLED", has_left=True), []),
        (make_stream("ad", "ABORTED", "CLIENT_STALLED"), []),
        (make_stream("add"), ["it ended OK without a terminal event"]),
        (make_stream("ad", "UNAVAILABLE", "RANK_DIED"), [WITHOUT_TERMINAL]),
        (make_stream("addf", num_tokens=1), ["it ended OK with 1 of 2 tokens"]),
        (make_stream("daf"), ["its first event is delta"]),
        (make_stream("adff"), ["its terminal event is not the one last event"]),
        (make_stream("afd"), ["its terminal event is not the one last event"]),
        (make_stream("adDFdf", sequences=2), []),
        (make_stream("addf", sequences=2), ["it ended OK without a terminal event"]),
        (make_stream("aFDf", sequences=2), ["its terminal event is not the one last event"]),
        (make_stream("adF", "UNAVAILABLE", "RANK_DIED", sequences=2), [WITHOUT_TERMINAL]),
    ],
    ids=lambda value: value.end if isinstance(value, Stream) else "",
)
def test_streams(stream: Stream, faults: list[str]) -> None:
    assert [*stream.find_faults()] == faults


def test_an_event_is_lost() -> None:
    stream = make_stream("addf")
    stream.numbers[2] += 1
    assert [*stream.find_faults()] == ["its sequence numbers are [0, 1, 3, 3]…"]


def test_a_failure_is_expected_while_its_fault_lasts() -> None:
    windows, begun_s = Windows(), time.monotonic()
    assert windows.stream_reasons(begun_s, begun_s + 5) == frozenset()
    with windows.open("kill a rank", RANKS_LOST, frozenset({"DEPLOYMENT_NOT_READY"})):
        assert windows.stream_reasons(begun_s, begun_s + 5) == RANKS_LOST
    assert windows.stream_reasons(begun_s, begun_s + 5) >= RANKS_LOST, "it began while the fault lasted"
    assert windows.call_reasons(begun_s, begun_s + 5) == {"DEPLOYMENT_NOT_READY"}
    assert windows.stream_reasons(begun_s + 60, begun_s + 65) == SUSPECTED


def sample(mb_per_hour: float, *, hours: float = 0.5, noise_mb: float = 5.0) -> list[tuple[float, float]]:
    draw = random.Random(7)
    seconds = range(int(hours * 3600))
    return [(at_s, 1e8 + 1e6 * (mb_per_hour * at_s / 3600 + draw.gauss(0, noise_mb))) for at_s in seconds]


def test_memory() -> None:
    flat, growing = fit_slope(sample(0)), fit_slope(sample(60))
    assert flat.is_flat
    assert abs(flat.mb_per_hour) < 4 * flat.error
    assert not growing.is_flat
    assert growing.mb_per_hour == pytest.approx(60, abs=4 * growing.error)
    assert growing.mb_per_hour * growing.hours > MAX_GROWTH_MB
    with pytest.raises(ValueError, match="too few"):
        fit_slope(sample(0)[:5])


def test_what_is_left_over(tmp_path: Path) -> None:
    own = {"runtime": [psutil.Process()]}
    before = take_census(own, [tmp_path])
    read_end, write_end = os.pipe()
    memory = os.memfd_create("kiln-steps")
    (tmp_path / "x.partial").touch()
    after = take_census(own, [tmp_path])
    assert [line.partition(",")[0] for line in after.list_leaks(before)] == [
        f"file {tmp_path}/x.partial",
        "runtime: kiln-steps",
        "runtime: pipe",
    ]
    for descriptor in (read_end, write_end, memory):
        os.close(descriptor)
    (tmp_path / "x.partial").unlink()
    assert take_census(own, [tmp_path]).list_leaks(before) == []
    assert Census(Counter(a=1)).list_leaks(Census(Counter(a=2))) == []


def test_stalls() -> None:
    before = {1: (5.0, 1.0), 2: (1.0, 0.0)}
    blocked = explain(1, before, {1: (6.8, 1.1), 2: (1.0, 0.0)}, own_wait_s=0.1, latency_s=2.0)
    assert blocked["stall_s"] == pytest.approx(1.8)
    assert blocked["computed_s"] == pytest.approx(1.8)
    starved = explain(1, before, {1: (5.1, 2.3), 2: (1.0, 0.2), 3: (0.0, 0.1)}, own_wait_s=0.2, latency_s=2.0)
    assert starved["stall_s"] == pytest.approx(2.0 - 1.3 - 0.2 - 0.2)
    seen = summarize([{"time_s": float(at_s), **one} for at_s, one in enumerate((blocked, starved))])
    assert seen["latency"]["max"] == 2.0
    assert find_stalls(seen) == ["0.0 s: the front stalled for 1.80 s (check: 2.00 s)"]


def test_rows() -> None:
    for rows in (BEHAVIOURS, FAULTS, OPERATIONS):
        names = [row.name for row in rows]
        assert len({*names}) == len(names)
        assert all(row.weight > 0 for row in rows)
