"""What the keys of prefixes begin with: requests that differ in anything that it is made of share nothing."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from bundle.abi.inputs import PromptLengths
from runtime_svc.engine.kv.kept_sequences import SessionKeeper
from tests.ranks.scheduling import make_request

#: Owner, salt, length of a prompt of which each has a class of its own, resets, key of the call.
Parts = tuple[str, str, int, int, bytes]

TEXTS = st.text('a1",', max_size=3)
PARTS = st.tuples(TEXTS, TEXTS, st.sampled_from([1, 2, 12]), st.sampled_from([0, 1, 2, 21]), st.binary(max_size=2))


def find_root(parts: Parts) -> bytes:
    owner, salt, num_tokens, num_resets, call_key = parts
    keeper = SessionKeeper(prompt_lengths=PromptLengths(limit=0, each=True), num_resets=num_resets)
    return keeper.find_prefix_root(make_request("r", num_tokens, owner=owner, cache_salt=salt), call_key)


@given(PARTS, PARTS)
@example(("a", "", 1, 0, b""), ("", "a", 1, 0, b""))
@example(("a", '","', 1, 0, b""), ('a","', "", 1, 0, b""))
@example(("", "", 1, 21, b""), ("", "", 12, 1, b""))
@example(("", "1", 1, 0, b""), ("", "", 1, 0, b"1"))
def test_roots_are_equal_if_all_parts_are(one: Parts, other: Parts) -> None:
    assert (find_root(one) == find_root(other)) is (one == other)
