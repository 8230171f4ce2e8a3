"""Which executable fits, in two dimensions: tokens to compute against tokens that are cached, rows against positions.

The rules are those of NxD Inference's feature guide, on plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from runtime_svc.errors import BucketExceeded

#: Prompts of this many tokens in all, cached or not, are computed whole if a bucket of the upper bound exists:
#: NxD Inference found that faster than to fetch a short prefix.
WHOLE_PROMPTS: Final = range(257, 513)

#: (tokens to compute, cached tokens) or (rows, positions).
Bucket = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt whose beginning is in the KV cache.

    Attributes:
        num_active: Tokens that are not, at least 1.
        num_cached: Tokens that are.
    """

    num_active: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """A bucket for prompts, and what becomes of each prompt's tokens.

    Attributes:
        bucket: (tokens to compute, cached tokens) of a row.
        num_moved: Of each prompt, tokens at the end of its cached prefix that are computed again, because the bucket
            has room for them; their keys and values are not written.
        num_cut: Of each prompt, active tokens that have no room; 0 unless inputs may be truncated.
    """

    bucket: Bucket
    num_moved: tuple[int, ...]
    num_cut: tuple[int, ...]


def choose_prefill(
    buckets: Sequence[Bucket],
    prompts: Sequence[CachedPrompt],
    *,
    truncates: bool = False,
    eagle_block_size: int | None = None,
) -> PrefillChoice:
    """Chooses the bucket of a context_encoding step over cached prefixes.

    The smallest number of tokens to compute that holds the largest active part; then, with as much of the prefixes
    moved into what that leaves free, the smallest number of cached tokens that holds the rest of every prefix. An exact
    fit fits.

    Args:
        buckets: (tokens to compute, cached tokens), in any order.
        prompts: One or more, a row each.
        truncates: Cut active parts that no bucket holds.
        eagle_block_size: With EAGLE, tokens of a KV block: one block is computed again for the target model, and only
            whole blocks are moved. None without.

    Raises:
        BucketExceeded: An active part, or what is left of a prefix, is larger than every bucket.
    """
    largest_total = max(prompt.num_active + prompt.num_cached for prompt in prompts)
    whole = (WHOLE_PROMPTS[-1], 0)
    if largest_total in WHOLE_PROMPTS and whole in buckets:
        return PrefillChoice(whole, tuple(prompt.num_cached for prompt in prompts), (0,) * len(prompts))
    recomputed, unit = (eagle_block_size or 0), (eagle_block_size or 1)
    widths = sorted({width for width, _ in buckets})
    needed = max(prompt.num_active for prompt in prompts) + recomputed
    width = _smallest(widths, needed)
    if width is None and not truncates:
        raise BucketExceeded("context_encoding", "tokens to compute", needed, widths[-1])
    width = widths[-1] if width is None else width
    num_moved = []
    for prompt in prompts:
        spare = max(0, width - prompt.num_active - recomputed)
        num_moved.append(min(prompt.num_cached, spare // unit * unit))
    left = max(prompt.num_cached - moved for prompt, moved in zip(prompts, num_moved, strict=True))
    depths = sorted(depth for width_, depth in buckets if width_ == width)
    depth = _smallest(depths, left)
    if depth is None:
        raise BucketExceeded("context_encoding", "cached tokens", left, depths[-1])
    num_cut = tuple(max(0, prompt.num_active + recomputed - width) for prompt in prompts)
    return PrefillChoice((width, depth), tuple(num_moved), num_cut)


def choose_decode(
    buckets: Sequence[Bucket],
    num_computed: Sequence[int],
    *,
    num_queries: int = 1,
    speculation_length: int = 0,
    truncates: bool = False,
) -> Bucket:
    """Chooses the bucket of a token_generation step over cached sequences: the smallest beyond every position.

    Strictly beyond: a sequence of n cached tokens writes its active one at position n.

    Args:
        buckets: (active tokens, positions), in any order.
        num_computed: Of each sequence, tokens in the KV cache; one or more.
        num_queries: Active tokens of a sequence.
        speculation_length: Positions that a step may add.
        truncates: Take the largest bucket if none is beyond.

    Raises:
        BucketExceeded: A sequence is too long for every bucket, or has too many active tokens.
    """
    needed = max(num_computed) + speculation_length
    fitting = [bucket for bucket in buckets if bucket[0] >= num_queries and bucket[1] > needed]
    if fitting:
        return min(fitting, key=lambda bucket: (bucket[1], bucket[0]))
    if truncates:
        return max(buckets, key=lambda bucket: (bucket[1], bucket[0]))
    if all(bucket[0] < num_queries for bucket in buckets):
        raise BucketExceeded("token_generation", "active tokens", num_queries, max(bucket[0] for bucket in buckets))
    raise BucketExceeded("token_generation", "positions", needed + 1, max(bucket[1] for bucket in buckets))


def choose_batch(buckets: Sequence[Bucket], num_rows: int, num_positions: int) -> Bucket:
    """Chooses among batch sizes of token generation: the fewest rows that hold all, then the fewest positions.

    Args:
        buckets: (rows, positions), in any order.
        num_rows: Sequences of the step.
        num_positions: Of the longest one, its active token's included. An exact fit fits.

    Raises:
        BucketExceeded: There are too many rows, or too many positions for buckets of so many rows.
    """
    sizes = sorted({rows for rows, _ in buckets})
    rows = _smallest(sizes, num_rows)
    if rows is None:
        raise BucketExceeded("token_generation", "rows", num_rows, sizes[-1])
    lengths = sorted(positions for rows_, positions in buckets if rows_ == rows)
    positions = _smallest(lengths, num_positions)
    if positions is None:
        raise BucketExceeded("token_generation", "positions", num_positions, lengths[-1])
    return rows, positions


def _smallest(ascending: Iterable[int], at_least: int) -> int | None:
    return next((size for size in ascending if size >= at_least), None)
