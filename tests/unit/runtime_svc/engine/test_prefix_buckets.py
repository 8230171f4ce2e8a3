"""Two-dimensional buckets: the feature guide's examples, the reference's cases, and what always holds."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runtime_svc.engine.scheduler.buckets import WHOLE_PROMPTS, Bucket, CachedPrompt, PrefillChoice, choose_prefill


def choose(buckets: list[Bucket], prompts: list[CachedPrompt]) -> PrefillChoice:
    choice = choose_prefill(buckets, prompts)
    assert choice is not None
    return choice


def grid(widths: list[int], depths: list[int]) -> list[Bucket]:
    return [(width, depth) for width in widths for depth in depths]


GUIDE = grid([512, 1024, 2048], [0, 512, 1024])
SMALL = grid([8, 16, 32], [0, 8, 16])


@pytest.mark.parametrize(
    ("active", "cached", "bucket"),
    [
        *[(7, 0, (8, 0)), (8, 0, (8, 0)), (9, 0, (16, 0)), (16, 0, (16, 0)), (17, 0, (32, 0)), (31, 0, (32, 0))],
        *[(4, 4, (8, 0)), (9, 4, (16, 0)), (17, 8, (32, 0))],
        *[(7, 4, (8, 8)), (4, 12, (8, 8)), (10, 8, (16, 8)), (10, 12, (16, 8)), (17, 16, (32, 8)), (30, 4, (32, 8))],
        *[(7, 12, (8, 16)), (4, 16, (8, 16)), (10, 16, (16, 16)), (10, 20, (16, 16))],
        *[(17, 24, (32, 16)), (30, 12, (32, 16))],
    ],
)
def test_prefill_is_upstreams(active: int, cached: int, bucket: Bucket) -> None:
    assert choose(SMALL, [CachedPrompt(active, cached)]).bucket == bucket


class TestShortPromptsComputedWhole:
    BUCKETS = grid([128, 256, 512], [0, 256, 512])

    @pytest.mark.parametrize(
        ("active", "cached", "bucket"),
        [
            (100, 156, (128, 256)),
            (100, 157, (512, 0)),
            (1, 511, (512, 0)),
            (512, 0, (512, 0)),
            (1, 512, (128, 512)),
        ],
    )
    def test_between_257_and_512_tokens_nothing_is_fetched(self, active: int, cached: int, bucket: Bucket) -> None:
        choice = choose(self.BUCKETS, [CachedPrompt(active, cached)])
        assert choice.bucket == bucket
        if bucket == (512, 0):
            assert choice.num_moved == (cached,)

    def test_only_where_there_is_such_a_bucket(self) -> None:
        choice = choose(grid([128, 512], [256, 512]), [CachedPrompt(100, 300)])
        assert choice.bucket == (128, 512)

    def test_the_longest_prompt_decides(self) -> None:
        prompts = [CachedPrompt(100, 300), CachedPrompt(100, 500)]
        assert choose(self.BUCKETS, prompts).bucket == (128, 512)


def test_every_row_fits() -> None:
    choice = choose(GUIDE, [CachedPrompt(260, 640), CachedPrompt(500, 512)])
    assert (choice.bucket, choice.num_moved) == ((512, 512), (252, 12))


#: Need not be a grid, or sorted.
SCATTERED = [(16, 8), (8, 16), (8, 0), (16, 0)]


def test_prompts_that_no_bucket_holds() -> None:
    assert choose(SCATTERED, [CachedPrompt(4, 9)]).bucket == (8, 16)
    # Of 1280 cached tokens 1088 are left.
    for buckets, prompt in ((SCATTERED, (9, 20)), (GUIDE, (2049, 0)), (GUIDE, (320, 1280))):
        assert choose_prefill(buckets, [CachedPrompt(*prompt)]) is None


SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=4, unique=True)
GRIDS = st.builds(lambda widths, depths: grid(widths, [0, *depths]), SIZES, SIZES)
PROMPTS = st.lists(st.builds(CachedPrompt, st.integers(1, 700), st.integers(0, 700)), min_size=1, max_size=4)


@given(GRIDS, PROMPTS)
def test_every_token_is_computed_or_read_once(buckets: list[Bucket], prompts: list[CachedPrompt]) -> None:
    widest, deepest = (max(bucket[axis] for bucket in buckets) for axis in (0, 1))
    choice = choose_prefill(buckets, prompts)
    if choice is None:
        is_too_wide = max(prompt.num_active for prompt in prompts) > widest
        assert is_too_wide or max(prompt.num_cached for prompt in prompts) > deepest
        return
    assert choice.bucket in buckets
    width, depth = choice.bucket
    for prompt, moved in zip(prompts, choice.num_moved, strict=True):
        assert 0 <= moved <= prompt.num_cached
        assert prompt.num_active + moved <= width, "the bucket holds what is computed"
        assert prompt.num_cached - moved <= depth, "the bucket holds what is read"


@given(GRIDS, PROMPTS)
def test_no_smaller_bucket_would_do(buckets: list[Bucket], prompts: list[CachedPrompt]) -> None:
    total = max(prompt.num_active + prompt.num_cached for prompt in prompts)
    assume(total not in WHOLE_PROMPTS or (512, 0) not in buckets)
    choice = choose_prefill(buckets, prompts)
    assume(choice is not None)
    assert choice is not None
    width, depth = choice.bucket
    longest = max(prompt.num_active for prompt in prompts)
    assert all(other < longest or other >= width for other, _ in buckets)
    left = max(max(0, prompt.num_cached - (width - prompt.num_active)) for prompt in prompts)
    assert all(other < left or other >= depth for _, other in buckets)
