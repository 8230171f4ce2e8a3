"""Bucket lengths, as NxD Inference generates them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

#: Shortest bucket that is generated, in tokens.
SHORTEST_BUCKET: Final = 128

#: Shortest prefill and prefix buckets that are generated with prefix caching, in tokens.
SHORTEST_PREFIX_BUCKET: Final = 512

#: Shortest token generation bucket that is generated with prefix caching, in tokens.
SHORTEST_BLOCK_BUCKET: Final = 256

#: Attributes that `resolve_buckets` reads.
BUCKET_ATTRIBUTES: Final = (
    "enable_bucketing",
    "context_encoding_buckets",
    "token_generation_buckets",
    "prefix_buckets",
    "is_prefix_caching",
    "max_context_length",
    "max_length",
    "seq_len",
    "n_active_tokens",
    "n_positions",
)


def generate_buckets(shortest: int, longest: int) -> tuple[int, ...]:
    """Bucket lengths from `shortest` to `longest`, in tokens.

    The powers of two between the two, without the last power of two if `longest` is nearer to it than to the next one
    on a logarithmic scale; `longest` itself is always the last bucket.
    """
    if shortest == longest:
        return (longest,)
    powers = range(int(math.log2(shortest)), round(math.log2(longest)))
    return (*(2**power for power in powers), longest)


def choose_buckets(
    *, enabled: bool, listed: tuple[int, ...], longest: int, shortest: int = SHORTEST_BUCKET
) -> tuple[int, ...]:
    """Buckets of a submodel, in tokens: listed by the user, or else generated; the longest alone without bucketing."""
    if not enabled:
        return (longest,)
    return listed or generate_buckets(shortest, longest)


def resolve_buckets(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The bucket lists of a NeuronConfig, chosen or generated, by attribute; `prefix_buckets` only with prefix caching.

    Takes `BUCKET_ATTRIBUTES`, resolved but for the lists, which are as the user gave them; an empty one is none.
    """
    enabled, caches_prefixes = values["enable_bucketing"], values["is_prefix_caching"]

    def choose(name: str, longest: int, shortest: int) -> tuple[int, ...]:
        return choose_buckets(enabled=enabled, listed=values[name], longest=longest, shortest=shortest)

    # `n_positions` limits buckets only if it is less than a whole sequence.
    positions = values["n_positions"]
    longest_sequence = values["max_length"] if positions >= values["seq_len"] else positions
    longest_prompt = min(values["max_context_length"], values["n_active_tokens"], positions)
    if not caches_prefixes:
        return {
            "context_encoding_buckets": choose("context_encoding_buckets", longest_prompt, SHORTEST_BUCKET),
            "token_generation_buckets": choose("token_generation_buckets", longest_sequence, SHORTEST_BUCKET),
            "prefix_buckets": (),
        }
    return {
        "context_encoding_buckets": choose("context_encoding_buckets", longest_prompt, SHORTEST_PREFIX_BUCKET),
        "token_generation_buckets": choose("token_generation_buckets", longest_sequence, SHORTEST_BLOCK_BUCKET),
        "prefix_buckets": choose("prefix_buckets", longest_prompt, SHORTEST_PREFIX_BUCKET),
    }


def pair_with_prefixes(prefills: tuple[int, ...], prefixes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Buckets (prefill, prefix) of context encoding with prefix caching, in tokens, shortest prefill first.

    Prefills are computed; prefixes are read from the cache, and 0, no prefix, comes on top of those given.
    """
    return tuple(itertools.product(prefills, (0, *prefixes)))


def pair_with_batches(
    batches: tuple[int, ...], largest_batch: int, lengths: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Buckets (batch size, length) of token generation, largest batch first, shortest length first within a batch.

    `largest_batch` is added to the batch sizes that the user lists, if it is not among them. Lengths are in tokens.
    """
    return tuple(itertools.product(sorted({*batches, largest_batch}, reverse=True), lengths))


def halve_buckets(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Prompt lengths that Transformers NeuronX compiles by default: half of each token generation bucket, in tokens.

    Half of an odd length is rounded down, as there; lengths that become equal are one bucket, and none is below 1.
    """
    return tuple(sorted({max(bucket // 2, 1) for bucket in buckets}))
