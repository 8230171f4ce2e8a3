"""Cases that cover all pairs of values of some factors, instead of all combinations."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def cover(
    factors: Mapping[str, Sequence[Any]],
    *,
    strength: int = 2,
    seed: int = 1,
    refused: Sequence[Mapping[str, Any]] = (),
    given: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Picks cases so that any values of any `strength` factors occur together in one of them; always the same cases.

    Args:
        refused: Values that no case has together.
        given: Cases that there are beside them.
    """

    def find(case: Mapping[str, Any]) -> dict[str, int]:
        return {name: values.index(case[name]) for name, values in factors.items() if name in case}

    draw = random.Random(seed)
    never = [find(case).items() for case in refused]
    missing = {
        tuple(zip(names, values, strict=True))
        for names in combinations(factors, strength)
        for values in product(*(range(len(factors[name])) for name in names))
    }
    missing = {one for one in missing if not any(pair <= dict(one).items() for pair in never)}
    for case in given:
        missing -= set(combinations(find(case).items(), strength))
    cases = []
    while missing:
        # Of some random cases around a combination that is missing, the one that has most of what is missing.
        wanted = dict(min(missing))
        candidates: list[dict[str, int]] = []
        while len(candidates) < 40:
            one = {name: wanted.get(name, draw.randrange(len(values))) for name, values in factors.items()}
            candidates += [one] if not any(pair <= one.items() for pair in never) else []
        covered = [missing.intersection(combinations(candidate.items(), strength)) for candidate in candidates]
        best = max(range(len(candidates)), key=lambda index: len(covered[index]))
        missing -= covered[best]
        cases.append({name: factors[name][index] for name, index in candidates[best].items()})
    return cases
