"""What the keys of prefixes begin with: requests that differ in anything that it is made of share nothing."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from bundle.abi.inputs import PromptLengths
from runtime_svc.engine.kv.kept_sequences import SessionKeeper
from runtime_svc.engine.request import Adapter
from tests.ranks.scheduling import make_request

#: Owner, salt, digest of an adapter, length of a prompt of which each has a class of its own, resets, epoch, key of the
#: call.
Parts = tuple[str, str, str | None, int, int, int, bytes]

TEXTS = st.text('a1",', max_size=3)
NUMBERS = st.sampled_from([1, 2, 12, 21])
PARTS = st.tuples(TEXTS, TEXTS, st.none() | TEXTS, NUMBERS, NUMBERS, NUMBERS, st.binary(max_size=2))


def find_root(parts: Parts) -> bytes:
    owner, salt, digest, num_tokens, num_resets, epoch, call_key = parts
    keeper = SessionKeeper(prompt_lengths=PromptLengths(limit=0, each=True), num_resets=num_resets)
    adapter = None if digest is None else Adapter("name", digest)
    request = make_request("r", num_tokens, owner=owner, cache_salt=salt, adapter=adapter, weight_epoch=epoch)
    return keeper.find_prefix_root(request, call_key)


@given(PARTS, PARTS)
@example(("a", "", None, 1, 1, 1, b""), ("", "a", None, 1, 1, 1, b""))
@example(("a", '","', None, 1, 1, 1, b""), ('a","', "", None, 1, 1, 1, b""))
@example(("", "", None, 1, 21, 1, b""), ("", "", None, 12, 1, 1, b""))
@example(("", "1", None, 1, 1, 1, b""), ("", "", None, 1, 1, 1, b"1"))
@example(("", "", None, 1, 1, 1, b""), ("", "", "", 1, 1, 1, b""))
@example(("", "", "null", 1, 1, 1, b""), ("", "", None, 1, 1, 1, b""))
def test_roots_are_equal_if_all_parts_are(one: Parts, other: Parts) -> None:
    assert (find_root(one) == find_root(other)) is (one == other)
