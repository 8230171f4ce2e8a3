"""Stop strings against a search through the whole text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_svc.text.codec import StopStringMatcher

ALPHABET = "ab🙂"
TEXT = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Reads the text character by character; returns its end, and the stop string that ended it."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=10))
def test_any_cut_finds_the_stop_that_is_complete_first(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopStringMatcher(stops)
    out = "".join(matcher.push(text[start:end]) for start, end in itertools.pairwise(edges))
    expected = first_stop(text, stops)
    assert matcher.matched == (expected[1] if expected else None)
    assert out + matcher.flush() == text[: expected[0] if expected else len(text)]


@given(TEXT, STOPS)
def test_only_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    out = matcher.push(text)
    if matcher.matched is None:
        held = text[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = [text[start:] for start in range(len(out))]
        assert not any(stop.startswith(end) for stop in stops for end in longer), "more should be held back"


def test_empty_stop_string_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        StopStringMatcher([""])
