from __future__ import annotations

import pytest

from bundle.manifest import Limits, Manifest
from compiler_svc.golden.sequences import MAX_EDGE_TOKENS, choose_sequences
from tests.bundles.manifests import VOCAB_SIZE, make_executable, make_manifest


def describe(contexts: tuple[int, ...], generators: tuple[int, ...], longest_prompt: int | None = None) -> Manifest:
    executables = [make_executable("context_encoding", bucket, 1) for bucket in contexts]
    executables += [make_executable("token_generation", bucket, 4) for bucket in generators]
    longest = max((*contexts, *generators))
    limits = Limits(
        max_context_length=longest_prompt or longest,
        max_length=longest,
        max_new_tokens=None,
        ctx_batch_size=1,
        tkg_batch_size=4,
    )
    return make_manifest(executables=executables, limits=limits)


def list_prompts(manifest: Manifest) -> list[tuple[str, int, int]]:
    return [(one.context, one.num_prompt_tokens, len(one.tokens)) for one in choose_sequences(manifest)]


def test_both_sides_of_every_edge() -> None:
    assert list_prompts(describe((64, 128), (128, 256))) == [
        ("context_encoding_64", 8, 12),
        ("context_encoding_64", 64, 68),
        ("context_encoding_128", 65, 69),
        # Positions 126 and 127 are the last of token_generation_128; the next two need token_generation_256.
        ("context_encoding_128", 126, 130),
        ("context_encoding_128", 128, 132),
    ]


@pytest.mark.parametrize(
    ("manifest", "lengths"),
    [
        (describe((16,), (16,)), [(8, 12), (14, 16), (16, 16)]),
        (describe((16, 32), (12,)), [(8, 12), (10, 12), (16, 16), (17, 17), (32, 32)]),
        (describe((16, 32), (64,), longest_prompt=20), [(8, 12), (16, 20), (17, 21)]),
        # A bucket that no prompt needs is filled as far as prompts may be long.
        (describe((16, 32), (64,), longest_prompt=12), [(8, 12), (12, 16)]),
        (describe((4,), (4,)), [(1, 4), (2, 4), (4, 4)]),
        (describe((1,), (1,)), [(1, 1)]),
        (describe((16,), ()), [(8, 8), (16, 16)]),
    ],
)
def test_limits_and_small_buckets(manifest: Manifest, lengths: list[tuple[int, int]]) -> None:
    assert [(prompt, tokens) for _, prompt, tokens in list_prompts(manifest)] == lengths


def test_long_edges_are_left_out() -> None:
    buckets = (128, 1024, 4096)
    lengths = [prompt for _, prompt, _ in list_prompts(describe(buckets, buckets))]
    needed = [8, 129, 1025]
    assert lengths == [8, 126, 128, 129, 1025]
    assert sum(set(lengths) - set(needed)) <= MAX_EDGE_TOKENS < sum(set(lengths) - set(needed)) + 1022


def test_one_long_bucket_gets_a_prompt_that_is_not_short() -> None:
    assert list_prompts(describe((4096,), (4096,))) == [
        ("context_encoding_4096", 8, 12),
        ("context_encoding_4096", MAX_EDGE_TOKENS, MAX_EDGE_TOKENS + 4),
    ]


def test_every_check_has_the_same_tokens_of_the_whole_vocabulary() -> None:
    manifest = describe((64, 128), (128, 256))
    sequences = choose_sequences(manifest)
    assert choose_sequences(manifest) == sequences
    assert sequences[0].tokens == (27, 24, 13, 8, 16, 12, 25, 9, 15, 18, 29, 16)
    assert {token for one in sequences for token in one.tokens} == set(range(VOCAB_SIZE))
