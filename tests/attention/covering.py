"""Cases that cover all pairs of values of some factors, instead of all combinations."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def cover(factors: Mapping[str, Sequence[Any]], *, strength: int = 2, seed: int = 1) -> list[dict[str, Any]]:
    """Picks cases so that any values of any `strength` factors occur together in one of them; always the same cases."""
    draw = random.Random(seed)
    missing = {
        tuple(zip(names, values, strict=True))
        for names in combinations(factors, strength)
        for values in product(*(range(len(factors[name])) for name in names))
    }
    cases = []
    while missing:
        # Of some random cases around a combination that is missing, the one that has most of what is missing.
        wanted = dict(min(missing))
        candidates = [
            {name: wanted.get(name, draw.randrange(len(values))) for name, values in factors.items()} for _ in range(40)
        ]
        covered = [missing.intersection(combinations(candidate.items(), strength)) for candidate in candidates]
        best = max(range(len(candidates)), key=lambda index: len(covered[index]))
        missing -= covered[best]
        cases.append({name: factors[name][index] for name, index in candidates[best].items()})
    return cases
