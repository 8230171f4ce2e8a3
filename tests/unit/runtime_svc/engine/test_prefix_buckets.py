"""Two-dimensional buckets: the feature guide's examples, the reference's cases, and what always holds."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runtime_svc.engine.scheduler.prefix_buckets import (
    WHOLE_PROMPTS,
    Bucket,
    CachedPrompt,
    choose_batch,
    choose_decode,
    choose_prefill,
)
from runtime_svc.errors import BucketExceeded


def grid(widths: list[int], depths: list[int]) -> list[Bucket]:
    return [(width, depth) for width in widths for depth in depths]


GUIDE = grid([512, 1024, 2048], [0, 512, 1024])
SMALL = grid([8, 16, 32], [0, 8, 16])
DECODE = [(1, 8), (1, 16), (1, 32)]


class TestTheGuidesExamples:
    """`context_encoding_buckets=[512, 1024, 2048]` and `prefix_buckets=[512, 1024]`."""

    def test_1000_tokens_without_a_prefix(self) -> None:
        choice = choose_prefill(GUIDE, [CachedPrompt(1000, 0)])
        assert (choice.bucket, choice.num_moved) == ((1024, 0), (0,))

    def test_800_tokens_whose_prefix_moves_whole(self) -> None:
        choice = choose_prefill(GUIDE, [CachedPrompt(672, 128)])
        assert (choice.bucket, choice.num_moved) == ((1024, 0), (128,))

    def test_900_tokens_of_whose_prefix_252_move(self) -> None:
        choice = choose_prefill(GUIDE, [CachedPrompt(260, 640)])
        assert (choice.bucket, choice.num_moved) == ((512, 512), (252,))
        assert 640 - choice.num_moved[0] == 388

    def test_1600_tokens_whose_prefix_exceeds_every_bucket(self) -> None:
        with pytest.raises(BucketExceeded, match="1088 cached tokens exceed the largest bucket") as raised:
            choose_prefill(GUIDE, [CachedPrompt(320, 1280)])
        assert raised.value.metadata["needed"] == "1088"


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
    assert choose_prefill(SMALL, [CachedPrompt(active, cached)]).bucket == bucket


@pytest.mark.parametrize(("computed", "positions"), [(7, 8), (8, 16), (15, 16), (16, 32), (31, 32)])
def test_decode_is_upstreams(computed: int, positions: int) -> None:
    assert choose_decode(DECODE, [computed]) == (1, positions)


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
        choice = choose_prefill(self.BUCKETS, [CachedPrompt(active, cached)])
        assert choice.bucket == bucket
        if bucket == (512, 0):
            assert choice.num_moved == (cached,)

    def test_only_where_there_is_such_a_bucket(self) -> None:
        choice = choose_prefill(grid([128, 512], [256, 512]), [CachedPrompt(100, 300)])
        assert choice.bucket == (128, 512)

    def test_the_longest_prompt_decides(self) -> None:
        prompts = [CachedPrompt(100, 300), CachedPrompt(100, 500)]
        assert choose_prefill(self.BUCKETS, prompts).bucket == (128, 512)


class TestPrefill:
    def test_every_row_fits(self) -> None:
        choice = choose_prefill(GUIDE, [CachedPrompt(260, 640), CachedPrompt(500, 512)])
        assert (choice.bucket, choice.num_moved) == ((512, 512), (252, 12))

    def test_a_prompt_that_no_bucket_holds(self) -> None:
        with pytest.raises(BucketExceeded, match="2049 tokens to compute exceed the largest bucket"):
            choose_prefill(GUIDE, [CachedPrompt(2049, 0)])

    def test_truncation_cuts_it_to_the_largest(self) -> None:
        choice = choose_prefill(GUIDE, [CachedPrompt(2100, 700), CachedPrompt(9, 0)], truncates=True)
        assert (choice.bucket, choice.num_moved, choice.num_cut) == ((2048, 1024), (0, 0), (52, 0))

    def test_truncation_cuts_no_prefix(self) -> None:
        with pytest.raises(BucketExceeded, match="cached tokens"):
            choose_prefill(GUIDE, [CachedPrompt(2100, 1025)], truncates=True)

    def test_eagle_computes_a_block_again_and_moves_whole_blocks(self) -> None:
        # 32 of the 512 are for the block; of the 220 that are left, six blocks of 32.
        choice = choose_prefill(GUIDE, [CachedPrompt(260, 640)], eagle_block_size=32)
        assert (choice.bucket, choice.num_moved) == ((512, 512), (192,))
        assert choose_prefill(GUIDE, [CachedPrompt(1000, 0)], eagle_block_size=32).bucket == (2048, 0)

    def test_buckets_need_not_be_a_grid_or_sorted(self) -> None:
        buckets = [(16, 8), (8, 16), (8, 0), (16, 0)]
        assert choose_prefill(buckets, [CachedPrompt(4, 9)]).bucket == (8, 16)
        with pytest.raises(BucketExceeded, match="largest bucket of context_encoding, 8"):
            choose_prefill(buckets, [CachedPrompt(9, 20)])


class TestDecode:
    def test_the_longest_sequence_decides(self) -> None:
        assert choose_decode(DECODE, [3, 15, 9]) == (1, 16)

    def test_speculation_needs_room(self) -> None:
        assert choose_decode(DECODE, [10], speculation_length=5) == (1, 16)
        assert choose_decode(DECODE, [10], speculation_length=6) == (1, 32)

    def test_queries_need_width(self) -> None:
        buckets = [(1, 8), (4, 16), (4, 32)]
        assert choose_decode(buckets, [3], num_queries=2) == (4, 16)
        with pytest.raises(BucketExceeded, match="5 active tokens exceed the largest bucket of token_generation, 4"):
            choose_decode(buckets, [3], num_queries=5)

    def test_beyond_the_largest(self) -> None:
        with pytest.raises(BucketExceeded, match="33 positions exceed the largest bucket of token_generation, 32"):
            choose_decode(DECODE, [32])
        assert choose_decode(DECODE, [32], truncates=True) == (1, 32)


class TestBatches:
    BUCKETS = (*grid([4], [128, 256]), *grid([1], [128, 256, 512]))

    @pytest.mark.parametrize(
        ("rows", "positions", "bucket"),
        [
            (1, 1, (1, 128)),
            (1, 128, (1, 128)),
            (1, 129, (1, 256)),
            (2, 5, (4, 128)),
            (4, 256, (4, 256)),
            (1, 512, (1, 512)),
        ],
    )
    def test_rows_come_first(self, rows: int, positions: int, bucket: Bucket) -> None:
        assert choose_batch(self.BUCKETS, rows, positions) == bucket

    def test_too_many_rows_or_positions(self) -> None:
        with pytest.raises(BucketExceeded, match="5 rows exceed the largest bucket of token_generation, 4"):
            choose_batch(self.BUCKETS, 5, 1)
        with pytest.raises(BucketExceeded, match="300 positions exceed the largest bucket of token_generation, 256"):
            choose_batch(self.BUCKETS, 2, 300)


SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=4, unique=True)
GRIDS = st.builds(lambda widths, depths: grid(widths, [0, *depths]), SIZES, SIZES)
PROMPTS = st.lists(st.builds(CachedPrompt, st.integers(1, 700), st.integers(0, 700)), min_size=1, max_size=4)


@given(GRIDS, PROMPTS, st.booleans())
def test_every_token_is_computed_or_read_once(
    buckets: list[Bucket], prompts: list[CachedPrompt], truncates: bool
) -> None:
    widest, deepest = (max(bucket[axis] for bucket in buckets) for axis in (0, 1))
    try:
        choice = choose_prefill(buckets, prompts, truncates=truncates)
    except BucketExceeded as error:
        if error.metadata["dimension"] == "tokens to compute":
            assert not truncates
            assert max(prompt.num_active for prompt in prompts) > widest
        else:
            assert max(prompt.num_cached for prompt in prompts) > deepest
        return
    assert choice.bucket in buckets
    width, depth = choice.bucket
    for prompt, moved, cut in zip(prompts, choice.num_moved, choice.num_cut, strict=True):
        computed, read = prompt.num_active - cut + moved, prompt.num_cached - moved
        assert 0 <= moved <= prompt.num_cached
        assert computed <= width, "the bucket holds what is computed"
        assert read <= depth, "the bucket holds what is read"
        assert computed + read + cut == prompt.num_active + prompt.num_cached, "nothing is lost"
        assert cut == 0 or (truncates and moved == 0 and computed == width)


@given(GRIDS, PROMPTS)
def test_no_smaller_bucket_would_do(buckets: list[Bucket], prompts: list[CachedPrompt]) -> None:
    total = max(prompt.num_active + prompt.num_cached for prompt in prompts)
    assume(total not in WHOLE_PROMPTS or (512, 0) not in buckets)
    try:
        width, depth = choose_prefill(buckets, prompts).bucket
    except BucketExceeded:
        return
    longest = max(prompt.num_active for prompt in prompts)
    assert all(other < longest or other >= width for other, _ in buckets)
    left = max(max(0, prompt.num_cached - (width - prompt.num_active)) for prompt in prompts)
    assert all(other < left or other >= depth for _, other in buckets)


@given(SIZES, st.lists(st.integers(0, 800), min_size=1, max_size=4), st.integers(0, 5))
def test_decode_takes_the_smallest_beyond(lengths: list[int], computed: list[int], speculation_length: int) -> None:
    buckets, needed = grid([1], lengths), max(computed) + speculation_length
    try:
        _, positions = choose_decode(buckets, computed, speculation_length=speculation_length)
    except BucketExceeded:
        assert max(lengths) <= needed
        return
    assert positions == min(length for length in lengths if length > needed)
