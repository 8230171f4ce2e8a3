"""Measures `kiln::attend`'s kernel and torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.kernels.candidates import DENSE, list_candidates, take_turns
from bench.tables import render_table
from targets.cpu import X86_64

HEADS: Final = 12
#: Queries that share a KV head.
GROUPS: Final = (1, 4)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of equal rows: each row's tokens are the last of its live positions. Heads have 64 dimensions."""

    rows: int
    tokens: int
    live: int
    group: int

    @property
    def word(self) -> str:
        """What the programs are called with."""
        return f"{self.rows}:{self.tokens}:{self.live}:{HEADS}:{HEADS // self.group}"

    @property
    def title(self) -> str:
        """What the step is, for people."""
        what = f"prompt of {self.tokens}" if self.tokens == self.live else f"{self.tokens} behind {self.live}"
        if self.tokens == 1:
            what = f"{self.rows} {'row' if self.rows == 1 else 'rows'} of {self.live}"
        return f"{what}, {self.group} {'query' if self.group == 1 else 'queries'} for each key"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """A rate of attention, by a thread's processor time, as `rates.Rate` is one of linear layers.

    Attributes:
        kernel: `own`, or `library`, which is `scaled_dot_product_attention`.
        dtype: Of queries and of the cache, such as `float32`.
        gflops: Billions of additions and multiplications a second. Pairs that a mask hides do not count.
        gigabytes: Billions of bytes of live keys and values a second.
    """

    kernel: str
    dtype: str
    isa: str
    shape: Shape
    gflops: float
    gigabytes: float
    spread: float

    def make_record(self) -> dict[str, object]:
        """Returns the fields as a file has them, with those of the shape among them."""
        record = asdict(self)
        return {**record.pop("shape"), **record}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> AttentionRate:
        """Makes a rate of what `make_record` returned."""
        rest = dict(record)
        shape = Shape(*(rest.pop(field.name) for field in fields(Shape)))
        return cls(shape=shape, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What one run measures: shapes, processor time of one measurement, and how often each is measured."""

    shapes: tuple[Shape, ...]
    seconds: float
    rounds: int

    @property
    def words(self) -> tuple[str, ...]:
        """What the programs are called with."""
        return (f"{self.seconds:g}", *(shape.word for shape in self.shapes))


_DECODE: Final = tuple(product((1, 4, 16), (1,), (64, 512, 4096)))
_PROMPTS: Final = ((1, 128, 128), (1, 512, 512), (1, 2048, 2048))
_CHUNKS: Final = ((1, 64, 4096),)
FULL: Final = Steps(
    shapes=tuple(Shape(*step, group) for group in GROUPS for step in (*_DECODE, *_PROMPTS, *_CHUNKS)),
    seconds=0.06,
    rounds=3,
)
QUICK: Final = Steps(shapes=(Shape(2, 1, 32, 4), Shape(1, 32, 32, 1), Shape(1, 8, 64, 1)), seconds=0.01, rounds=1)


def measure_attend(directory: Path, steps: Steps) -> list[AttentionRate]:
    """Measures all kernels in turns."""
    shapes = {shape.word: shape for shape in steps.shapes}
    # By what changes our kernel: the width of vectors, and products of bfloat16. Torch may use the highest level's.
    levels = [X86_64[isa] for isa in X86_64.list_supported()]
    isas = list({(level.vector_bits, "avx512_bf16" in level.added_flags): level.name for level in levels}.values())
    candidates = list(list_candidates("attend", "bench.kernels.sdpa", isas, DENSE, directory))
    return [
        AttentionRate(
            kernel=candidate.kernel,
            dtype=candidate.pair[0],
            isa=candidate.isa,
            shape=shapes[word],
            gflops=speed.gflops,
            gigabytes=speed.gigabytes,
            spread=speed.spread,
        )
        for candidate, speeds in take_turns(candidates, steps.words, steps.rounds)
        for word, speed in speeds.items()
    ]


def render_attend(rates: Sequence[AttentionRate], machine: str) -> list[str]:
    """Renders what attention reached: one table for each dtype, with our kernel beside torch's for each level."""
    isas = list(dict.fromkeys(rate.isa for rate in rates))
    by_key = {(rate.dtype, rate.shape, rate.isa, rate.kernel): rate for rate in rates}
    sections = [
        (
            "## Attention\n\n"
            f"`kiln::attend` over {HEADS} heads of 64, then torch's `scaled_dot_product_attention` over the same\n"
            "positions: GFLOP/s of a thread by its processor time (GB/s of live keys and values). Ours writes the\n"
            "step's keys and values into the cache as well. Caches lie in huge pages and exceed the processor's;\n"
            "`attend.json` has the "
            f"spread. Machine: {machine}."
        )
    ]
    for dtype in dict.fromkeys(rate.dtype for rate in rates):
        rows = []
        for shape in dict.fromkeys(rate.shape for rate in rates):
            pairs = ([by_key[dtype, shape, isa, kernel] for kernel in ("own", "library")] for isa in isas)
            cells = (f"{own.gflops:.1f} ({own.gigabytes:.1f}); {library.gflops:.1f}" for own, library in pairs)
            rows.append((shape.title, *cells))
        sections.append(f"### Attention in {dtype}\n\n" + render_table(("step", *isas), rows))
    return sections
