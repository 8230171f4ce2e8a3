"""The token sequences of the golden check. Equal vocabularies, buckets and limits give equal sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bundle.manifest import Executable, Manifest

#: Number of tokens in the shortest prompt, and of tokens fed one by one after each prompt.
SHORT_PROMPT_TOKENS: Final = 8
NUM_STEPS: Final = 4
#: Most tokens, together, of prompts at edges of buckets. It bounds the time of the check: longer prompts are added only
#: where no shorter one needs the bucket.
MAX_EDGE_TOKENS: Final = 512


@dataclass(frozen=True)
class GoldenSequence:
    """The token ids of one sequence: a prompt of `num_prompt_tokens`, which the executable with the tag `context`
    encodes, then tokens fed one by one.
    """

    context: str
    num_prompt_tokens: int
    tokens: tuple[int, ...]


def choose_sequences(manifest: Manifest) -> tuple[GoldenSequence, ...]:
    """Chooses the sequences for a bundle, shortest first.

    For each context_encoding executable there is the shortest prompt that needs its bucket. As far as MAX_EDGE_TOKENS
    allows, there are also prompts that fill a bucket, and prompts after which a token_generation bucket gets full and
    the next one takes over. What is left becomes one more prompt if the last bucket is longer, and no other prompt is.
    Token ids are random, of the whole vocabulary.
    """
    generators = manifest.executables_of("token_generation")
    longest = min(generators[-1].bucket[0], manifest.limits.max_length) if generators else 0
    # Of random's methods, only this one gives the same numbers in every version of Python.
    draw, vocab_size = random.Random(0).random, manifest.tokens.vocab_size
    sequences = []
    for context, num_prompt_tokens in _choose_prompts(manifest):
        num_tokens = max(num_prompt_tokens, min(num_prompt_tokens + NUM_STEPS, longest))
        tokens = tuple(int(draw() * vocab_size) for _ in range(num_tokens))
        sequences.append(GoldenSequence(context.tag, num_prompt_tokens, tokens))
    return tuple(sequences)


def _choose_prompts(manifest: Manifest) -> list[tuple[Executable, int]]:
    """Pairs of a context_encoding executable and the length of a prompt for it."""
    contexts, limits = manifest.executables_of("context_encoding"), manifest.limits
    longest = min(limits.max_context_length, limits.max_length)
    prompts = [(context, min(_reach(context, manifest), longest)) for context in contexts]
    left = MAX_EDGE_TOKENS
    for length in sorted(set(_list_edges(manifest))):
        fitting = next((context for context in contexts if context.bucket[0] >= length), None)
        if fitting is None or length > longest or (fitting, length) in prompts:
            continue
        if length > left:
            break
        left -= length
        prompts.append((fitting, length))
    if contexts[-1].bucket[0] > MAX_EDGE_TOKENS and max(length for _, length in prompts) < left < longest:
        # The last bucket is too long to be filled, and no prompt comes near its end.
        prompts.append((next(context for context in contexts if context.bucket[0] >= left), left))
    return sorted(prompts, key=lambda prompt: prompt[1])


def _reach(context: Executable, manifest: Manifest) -> int:
    """Tokens of the shortest prompt that needs a bucket; for the smallest, of one that leaves room in every bucket."""
    contexts = manifest.executables_of("context_encoding")
    smaller = [other.bucket[0] for other in contexts if other.bucket[0] < context.bucket[0]]
    if smaller:
        return max(smaller) + 1
    smallest = min(executable.bucket[0] for executable in manifest.executables)
    return max(1, min(SHORT_PROMPT_TOKENS, smallest - NUM_STEPS))


def _list_edges(manifest: Manifest) -> Iterator[int]:
    for context in manifest.executables_of("context_encoding"):
        yield context.bucket[0]
    for generator in manifest.executables_of("token_generation"):
        # Half of the steps that follow take the last positions of this bucket.
        yield max(1, generator.bucket[0] - NUM_STEPS // 2)
