"""Which process of a runtime dies or hangs, and in the middle of what."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from tests.system.kills.kill import Death, Kill, cross
from tests.system.kills.runtime_actions import BEGUN, SENT

TEXTS: Final = ("kiln-texts", "kiln-text")
RANKS: Final = ("kiln-rank-0", "kiln-rank-1")
#: The runtime and all below it, which are stopped for a while and go on, as `docker pause` does it.
EVERYONE: Final = "everyone"
_LOST: Final = frozenset({"RANK_DIED", "DEPLOYMENT_NOT_READY"})
#: Victim -> reasons with which calls may end because of its death. They may also come to their end, and those of the
#: runtime itself are interrupted.
REASONS: Final[Mapping[str, frozenset[str]]] = {
    "runtime": frozenset({"INTERRUPTED"}),
    EVERYONE: frozenset(),
    **dict.fromkeys(("kiln-forkserver", *RANKS), _LOST),
    **dict.fromkeys(TEXTS, frozenset({"TEXT_PROCESS_LOST"})),
}


def die_in_load(victims: Collection[str], stages: Collection[str], fast: str) -> Iterator[Kill[str]]:
    """Ranks die while the others are stopped: a load of so small a model might end before, but not without them."""
    for victim in victims:
        for stage in stages:
            yield Kill("load", (Death(victim, stage, reason="RANK_DIED"),), is_fast=f"{victim} {stage}" == fast)


#: Points are stages of an action or of a call, or a number of tokens or of swaps.
RUNTIME_KILLS: Final[tuple[Kill[str], ...]] = (
    *cross("load", ("runtime",), ("RESOLVE", "FETCH", "VERIFY", "MAP", "WARMUP")),
    *cross("load", ("kiln-forkserver",), ("MAP", "WARMUP")),
    *die_in_load(RANKS, ("MAP", "WARMUP"), fast="kiln-rank-0 MAP"),
    *cross("load", TEXTS, ("MAP",)),
    *cross("swap", ("runtime", "kiln-forkserver"), ("FETCH", "VERIFY", "MAP", "SWAP")),
    *cross("swap", ("kiln-rank-0",), ("VERIFY", "MAP", "SWAP")),
    *cross("swap", ("kiln-rank-1",), ("VERIFY", "MAP", "SWAP"), fast="SWAP"),
    *cross("swap unrecorded", ("runtime",), ("0", "2")),
    *cross("swap and rest", ("runtime",), ("0",)),
    *cross("generate", ("runtime", "kiln-forkserver", "kiln-rank-1"), ("1", "50")),
    *cross("generate", ("kiln-rank-0",), ("1", "50")),
    Kill("generate", (Death("kiln-rank-1", "1", signal.SIGSTOP, "RANK_HUNG"),)),
    Kill("generate", (Death(EVERYONE, "1", signal.SIGSTOP),)),
    *cross("tokenize", TEXTS, (SENT, BEGUN)),
    *cross("capture", ("runtime", "kiln-rank-1"), ("20",)),
    *cross("reset", ("runtime", "kiln-forkserver", "kiln-rank-0"), (SENT, BEGUN)),
    *cross("unload", ("runtime", "kiln-forkserver", "kiln-rank-0"), (SENT, BEGUN)),
)
