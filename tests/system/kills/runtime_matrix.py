"""Which process of a runtime dies, and in the middle of what."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

TEXTS: Final = ("kiln-texts", "kiln-text")
_LOST: Final = frozenset({"RANK_DIED", "DEPLOYMENT_NOT_READY"})
#: Victim -> reasons with which calls may end because of its death. They may also come to their end, and those of the
#: runtime itself are interrupted.
REASONS: Final[Mapping[str, frozenset[str]]] = {
    "runtime": frozenset({"INTERRUPTED"}),
    **dict.fromkeys(("kiln-forkserver", "kiln-rank-0", "kiln-rank-1"), _LOST),
    **dict.fromkeys(TEXTS, frozenset({"TEXT_PROCESS_LOST"})),
}


@dataclass(frozen=True)
class Kill:
    """One point of the matrix.

    Attributes:
        action: A key of the actions of `test_runtime_kills`.
        victim: Name of the process that is killed.
        point: A stage of the action, or the number of tokens or milliseconds after its beginning.
    """

    action: str
    victim: str
    point: str

    def __str__(self) -> str:
        return f"{self.action}, {self.victim}, {self.point}"


def cross(action: str, victims: Collection[str], points: Collection[str]) -> Iterator[Kill]:
    for victim in victims:
        for point in points:
            yield Kill(action, victim, point)


_RANKS: Final = ("kiln-rank-0", "kiln-rank-1")

RUNTIME_KILLS: Final = (
    *cross("load", ("runtime",), ("RESOLVE", "FETCH", "VERIFY", "MAP", "WARMUP")),
    *cross("load", ("kiln-forkserver", *_RANKS), ("MAP", "WARMUP")),
    *cross("load", TEXTS, ("MAP",)),
    *cross("swap", ("runtime", "kiln-forkserver"), ("FETCH", "VERIFY", "MAP", "SWAP")),
    *cross("swap", _RANKS, ("VERIFY", "MAP", "SWAP")),
    *cross("generate", ("runtime", "kiln-forkserver", *_RANKS), ("1", "50")),
    *cross("tokenize", TEXTS, ("0", "2")),
    *cross("capture", ("runtime", "kiln-rank-1"), ("20",)),
    *cross("reset", ("runtime", "kiln-forkserver", "kiln-rank-0"), ("0", "2")),
    *cross("unload", ("runtime", "kiln-forkserver", "kiln-rank-0"), ("0", "2")),
)
