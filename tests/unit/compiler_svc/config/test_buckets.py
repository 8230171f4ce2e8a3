"""Expected lists of the reference come from evaluating NxD Inference's own functions."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.config.buckets import (
    choose_buckets,
    generate_buckets,
    halve_buckets,
    pair_with_batches,
    pair_with_prefixes,
    resolve_buckets,
)

LENGTHS = st.integers(1, 2**20)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (1, (1,)),
        (64, (64,)),
        (128, (128,)),
        (181, (181,)),
        (182, (128, 182)),
        (256, (128, 256)),
        (512, (128, 256, 512)),
        (513, (128, 256, 513)),
        (1000, (128, 256, 512, 1000)),
        (1500, (128, 256, 512, 1024, 1500)),
        (10240, (128, 256, 512, 1024, 2048, 4096, 10240)),
        (12000, (128, 256, 512, 1024, 2048, 4096, 8192, 12000)),
    ],
)
def test_generated_buckets_are_those_of_nxd_inference(longest: int, expected: tuple[int, ...]) -> None:
    assert generate_buckets(128, longest) == expected


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [
        (64, 256, (64, 128, 256)),
        (256, 1024, (256, 512, 1024)),
        (512, 2048, (512, 1024, 2048)),
        (512, 300, (300,)),
        (512, 725, (512, 725)),
        (512, 724, (724,)),
    ],
)
def test_generated_buckets_may_begin_elsewhere(shortest: int, longest: int, expected: tuple[int, ...]) -> None:
    assert generate_buckets(shortest, longest) == expected


@given(shortest=st.sampled_from((64, 128, 256, 512)), longest=LENGTHS)
def test_generated_buckets_ascend_to_the_longest(shortest: int, longest: int) -> None:
    buckets = generate_buckets(shortest, longest)
    assert buckets[-1] == longest
    assert all(shorter < longer for shorter, longer in itertools.pairwise(buckets))
    assert all(bucket >= min(shortest, longest) for bucket in buckets)


@given(longest=LENGTHS)
def test_generated_buckets_waste_at_most_two_thirds(longest: int) -> None:
    """From the shortest bucket on, each is at most 2 * sqrt(2) times the one before."""
    for shorter, longer in itertools.pairwise(generate_buckets(128, longest)):
        assert longer / shorter <= 2 * 2**0.5


def test_a_list_wins_only_where_bucketing_is_on() -> None:
    assert choose_buckets(enabled=False, listed=(8, 16), longest=512) == (512,)
    assert choose_buckets(enabled=True, listed=(8, 16), longest=512) == (8, 16)
    assert choose_buckets(enabled=True, listed=(), longest=512) == (128, 256, 512)
    assert choose_buckets(enabled=True, listed=(), longest=512, shortest=256) == (256, 512)


def values_with(**given_values: Any) -> dict[str, Any]:
    return {
        "enable_bucketing": True,
        "is_prefix_caching": False,
        "max_context_length": 1024,
        "max_length": 2048,
        "seq_len": 2048,
        "n_active_tokens": 2048,
        "n_positions": 2048,
        "context_encoding_buckets": (),
        "token_generation_buckets": (),
        "prefix_buckets": (),
    } | given_values


@pytest.mark.parametrize(
    ("given_values", "prefill", "decode", "prefix"),
    [
        ({"enable_bucketing": False}, (1024,), (2048,), ()),
        ({}, (128, 256, 512, 1024), (128, 256, 512, 1024, 2048), ()),
        ({"enable_bucketing": False, "n_active_tokens": 100}, (100,), (2048,), ()),
        ({"n_active_tokens": 300}, (128, 300), (128, 256, 512, 1024, 2048), ()),
        ({"n_positions": 300}, (128, 300), (128, 300), ()),
        ({"n_positions": 1500, "max_length": 4096}, (128, 256, 512, 1024), (128, 256, 512, 1024, 1500), ()),
        ({"n_positions": 2048, "max_length": 4096}, (128, 256, 512, 1024), (128, 256, 512, 1024, 2048, 4096), ()),
        ({"context_encoding_buckets": (100, 900)}, (100, 900), (128, 256, 512, 1024, 2048), ()),
        ({"is_prefix_caching": True, "enable_bucketing": False}, (1024,), (2048,), (1024,)),
        ({"is_prefix_caching": True}, (512, 1024), (256, 512, 1024, 2048), (512, 1024)),
        # Upstream fails without a list of prefixes.
        (
            {"is_prefix_caching": True, "context_encoding_buckets": (256, 1024)},
            (256, 1024),
            (256, 512, 1024, 2048),
            (512, 1024),
        ),
        (
            {"is_prefix_caching": True, "prefix_buckets": (768,), "token_generation_buckets": (2048,)},
            (512, 1024),
            (2048,),
            (768,),
        ),
    ],
)
def test_bucket_lists_are_resolved_together(
    given_values: dict[str, Any], prefill: tuple[int, ...], decode: tuple[int, ...], prefix: tuple[int, ...]
) -> None:
    assert resolve_buckets(values_with(**given_values)) == {
        "context_encoding_buckets": prefill,
        "token_generation_buckets": decode,
        "prefix_buckets": prefix,
    }


@given(
    enabled=st.booleans(),
    caches_prefixes=st.booleans(),
    lengths=st.tuples(LENGTHS, LENGTHS).map(sorted),
)
def test_resolved_buckets_end_at_the_longest_lengths(enabled: bool, caches_prefixes: bool, lengths: list[int]) -> None:
    longest_prompt, longest_sequence = lengths
    lists = resolve_buckets(
        values_with(
            enable_bucketing=enabled,
            is_prefix_caching=caches_prefixes,
            max_context_length=longest_prompt,
            n_active_tokens=longest_prompt,
            **dict.fromkeys(("max_length", "seq_len", "n_positions"), longest_sequence),
        )
    )
    assert lists["context_encoding_buckets"][-1] == longest_prompt
    assert lists["token_generation_buckets"][-1] == longest_sequence
    assert lists["prefix_buckets"][-1:] == ((longest_prompt,) if caches_prefixes else ())


def test_prefixes_make_a_grid_with_none_first() -> None:
    assert pair_with_prefixes((128, 256), (128, 256)) == (
        (128, 0),
        (128, 128),
        (128, 256),
        (256, 0),
        (256, 128),
        (256, 256),
    )
    assert pair_with_prefixes((1024,), (1024,)) == ((1024, 0), (1024, 1024))


def test_batches_make_a_grid_with_the_largest_first() -> None:
    assert pair_with_batches((1, 4), 8, (128, 256)) == ((8, 128), (8, 256), (4, 128), (4, 256), (1, 128), (1, 256))
    assert pair_with_batches((4,), 4, (64,)) == ((4, 64),)


def test_halves_of_token_buckets_are_the_prompt_buckets_of_transformers_neuronx() -> None:
    assert halve_buckets((128, 256, 512, 1024, 2048)) == (64, 128, 256, 512, 1024)
    assert halve_buckets((128, 181)) == (64, 90)
    assert halve_buckets((1, 2, 3)) == (1,)


@given(st.lists(LENGTHS, min_size=1, unique=True).map(sorted))
def test_halves_ascend_and_fit(buckets: list[int]) -> None:
    halves = halve_buckets(tuple(buckets))
    assert list(halves) == sorted(set(halves))
    assert halves[-1] == max(buckets[-1] // 2, 1)
