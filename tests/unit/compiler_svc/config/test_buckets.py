"""Expected lists of the reference come from evaluating NxD Inference's own functions."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.config.buckets import generate_buckets, resolve_buckets

LENGTHS = st.integers(1, 2**20)


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [
        (128, 1, (1,)),
        (128, 64, (64,)),
        (128, 128, (128,)),
        (128, 181, (181,)),
        (128, 182, (128, 182)),
        (128, 256, (128, 256)),
        (128, 512, (128, 256, 512)),
        (128, 513, (128, 256, 513)),
        (128, 1000, (128, 256, 512, 1000)),
        (128, 1500, (128, 256, 512, 1024, 1500)),
        (128, 10240, (128, 256, 512, 1024, 2048, 4096, 10240)),
        (128, 12000, (128, 256, 512, 1024, 2048, 4096, 8192, 12000)),
        (64, 256, (64, 128, 256)),
        (256, 1024, (256, 512, 1024)),
        (512, 2048, (512, 1024, 2048)),
        (512, 300, (300,)),
        (512, 725, (512, 725)),
        (512, 724, (724,)),
    ],
)
def test_generated_buckets_are_those_of_nxd_inference(shortest: int, longest: int, expected: tuple[int, ...]) -> None:
    assert generate_buckets(shortest, longest) == expected


@given(shortest=st.sampled_from((64, 128, 256, 512)), longest=LENGTHS)
def test_generated_buckets_ascend_to_the_longest_and_waste_at_most_two_thirds(shortest: int, longest: int) -> None:
    """From the shortest bucket on, each is at most 2 * sqrt(2) times the one before."""
    buckets = generate_buckets(shortest, longest)
    assert buckets[-1] == longest
    assert all(1 < longer / shorter <= 2 * 2**0.5 for shorter, longer in itertools.pairwise(buckets))
    assert all(bucket >= min(shortest, longest) for bucket in buckets)


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
        ({"enable_bucketing": False, "context_encoding_buckets": (8, 16)}, (1024,), (2048,), ()),
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
