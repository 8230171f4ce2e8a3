"""Fuzzing: one profile for every test that feeds a parser, and documents that are nearly right.

Every run has a seed of its own, which pytest prints at its head; `KILN_FUZZ_SEED=N` repeats one. So short runs add up:
each parser gets a fifth of its examples, unless `KILN_FUZZ_SHARE` says otherwise.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from typing import Any, Final

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

SEED: Final = int(os.environ.get("KILN_FUZZ_SEED") or random.SystemRandom().randrange(2**32))
#: Examples of a parser in a full run.
EXAMPLES: Final = 5000
_SHARE: Final = float(os.environ.get("KILN_FUZZ_SHARE") or 0.2)

#: A busy host takes its time: no example has a deadline.
settings.register_profile("run", settings(), deadline=None)
settings.load_profile("run")

Test = Callable[..., None]

#: Values that a hostile writer would put in place of a path, a name or a number.
ODD_VALUES: Final = (
    *("", ".", "..", "../../../etc/passwd", "/etc/passwd", "a/../../b", "a\\b", "\0", "\n", "\ud800", "é" * 300),
    *("sha256:../../../etc/passwd", "sha256:" + "0" * 64, "SHA256:" + "0" * 64, "sha256-" + "0" * 64),
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, [], {}, [[]], {"": None}),
)


def fuzz(examples: int = EXAMPLES) -> Callable[[Test], Test]:
    """Runs a test with the run's share of so many examples, drawn from the run's seed."""

    def decorate(test: Test) -> Test:
        profile = settings(
            max_examples=math.ceil(_SHARE * examples),
            deadline=None,
            derandomize=False,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        seeded: Test = seed(SEED)(profile(test))
        return seeded

    return decorate


def mutated(document: Any) -> st.SearchStrategy[bytes]:
    """JSON of a document with one to four changes, now and then with a few bytes of it changed as well.

    Drawn from Python's own generator, which is many times faster than drawing every choice.
    """
    return st.integers(0, 2**64 - 1).map(lambda number: _mutate_document(random.Random(number), document))


def nearly(*texts: str) -> st.SearchStrategy[str]:
    """Texts with up to three changes of the given ones and of odd ones."""
    odd = tuple(value for value in ODD_VALUES if isinstance(value, str))

    def draw(number: int) -> str:
        choose = random.Random(number)
        text = choose.choice(texts) if choose.random() < 0.9 else choose.choice(odd)
        for _ in range(choose.randint(0, 3)):
            text = _mutate_text(choose, text)
        return text

    return st.integers(0, 2**64 - 1).map(draw)


def broken(data: bytes) -> st.SearchStrategy[bytes]:
    """Bytes with a few of them changed, inserted, removed or cut off."""
    return st.integers(0, 2**64 - 1).map(lambda number: break_bytes(random.Random(number), data))


def _mutate_document(choose: random.Random, document: Any) -> bytes:
    for _ in range(choose.randint(1, 4)):
        document = _mutate(choose, document)
    data = json.dumps(document).encode()
    return break_bytes(choose, data) if choose.random() < 0.1 else data


def _mutate(choose: random.Random, node: Any) -> Any:
    if choose.random() < 0.9:
        if isinstance(node, list) and node:
            return _mutate_list(choose, node)
        if isinstance(node, dict) and node:
            return _mutate_object(choose, node)
    if isinstance(node, int) and choose.random() < 0.5:
        return node + choose.choice((-1, 1, 2**31, -(2**63)))
    if isinstance(node, str) and choose.random() < 0.3:
        return _mutate_text(choose, node)
    return choose.choice(ODD_VALUES)


def _mutate_list(choose: random.Random, node: list[Any]) -> list[Any]:
    position = choose.randrange(len(node))
    match choose.randrange(6):
        case 0:
            return node[:position] + node[position + 1 :]
        case 1:
            return [*node, node[position]]
        case _:
            return [*node[:position], _mutate(choose, node[position]), *node[position + 1 :]]


def _mutate_object(choose: random.Random, node: dict[str, Any]) -> dict[str, Any]:
    key = choose.choice(list(node))
    match choose.randrange(8):
        case 0:
            return {name: value for name, value in node.items() if name != key}
        case 1:
            return node | {choose.choice(("", "new", key.upper(), key + "s", "\ud800")): node[key]}
        case _:
            return node | {key: _mutate(choose, node[key])}


def _mutate_text(choose: random.Random, text: str) -> str:
    start = choose.randint(0, len(text))
    stop = min(len(text), start + choose.choice((0, 0, 1, 4, 100)))
    added = choose.choice(
        ("", "", "0", "a", "A", "v", ":", "@", "-", "/", "/..", "..", ".", " ", "\n", "\0", "€", "\ud800")
    )
    return text[:start] + added + text[stop:]


def break_bytes(choose: random.Random, data: bytes) -> bytes:
    for _ in range(choose.randint(1, 4)):
        start = choose.randint(0, len(data))
        stop = min(len(data), start + choose.choice((0, 1, 1, 4, 1000)))
        data = data[:start] + choose.randbytes(choose.choice((0, 1, 1, 4))) + data[stop:]
    return data
