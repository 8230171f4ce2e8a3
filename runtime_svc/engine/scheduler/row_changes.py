"""What the processors of a request change in each step, as executables with the flag `processors` and the host take it.

They are those of transformers' `generate`, in its order: logit_bias, repetition_penalty, frequency_penalty and
presence_penalty make pairs of token id and numbers; no_repeat_ngram_size, bad words, min_new_tokens, allowed tokens, a
constraint and forced tokens make a mask; min_p and typical_p are cuts.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from bundle.abi.inputs import WORD_BITS, read_cuts
from execution.sampling_parameters import SamplingParams
from execution.step import ProcessedRow


class RowChanges:
    """Values of the inputs of processors in the rows of one request. They follow its output, token by token."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._num_taken = 0
        # All at once, because long prompts would take long one by one.
        repeated = set(prompt) if sampling.repetition_penalty != 1 else set()
        ids = list(dict.fromkeys((*sampling.logit_bias, *(prompt if repeated else ()))))
        # Place of each token that has changed, in the arrays below.
        self._places = {token: place for place, token in enumerate(ids)}
        factors = [sampling.repetition_penalty if token in repeated else 1.0 for token in ids]
        self.pairs: dict[str, array[Any]] = {
            "pair_ids": array("i", ids),
            "pair_bias": array("f", [sampling.logit_bias.get(token, 0.0) for token in ids]),
            "pair_factor": array("f", factors),
            "pair_penalty": array("f", bytes(4 * len(ids))),
        }
        self.cuts = array("f", read_cuts(sampling))
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._frequency, self._presence = array("f", (-sampling.frequency_penalty, sampling.presence_penalty))
        self._allowed = make_mask(sampling.allowed_token_ids, vocab_size)
        # Tokens so far, if any of them exclude others, and which tokens have followed each few of them.
        self._history: list[int] = []
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        if self._keeps_history:
            for token in prompt:
                self._remember(token)

    def advance(self, output: Sequence[int]) -> None:
        """Takes in the tokens of the request's output that came since the last call."""
        sampling = self._sampling
        for token in output[self._num_taken :]:
            if sampling.repetition_penalty != 1:
                self._set(token, "pair_factor", sampling.repetition_penalty)
            if self._keeps_history:
                self._remember(token)
            if sampling.frequency_penalty or sampling.presence_penalty:
                self._counts[token] += 1
                (repeated,) = array("f", (self._counts[token] * self._frequency,))
                self._set(token, "pair_penalty", repeated - self._presence)
        self._num_taken = len(output)

    def make_mask(
        self, num_generated: int, ends: Collection[int], constraint: bytes | None = None
    ) -> array[int] | None:
        """The row's part of `token_bitmask`, behind so many generated tokens; None if all tokens are left.

        `ends` are not yet allowed. A constraint is a mask, too, and excludes alone where nothing else would be left.
        """
        sampling = self._sampling
        if num_generated < len(sampling.forced_token_ids):
            return array("i", make_mask(sampling.forced_token_ids[num_generated : num_generated + 1], self._vocab_size))
        excluded = {*ends, *self._find_repeating(), *self._find_bad()}
        allowed = sampling.allowed_token_ids
        if not excluded and not allowed:
            return None if constraint is None else array("i", constraint)
        leaves_none = excluded.issuperset(allowed) if allowed else len(excluded) >= self._vocab_size
        mask = bytearray(self._allowed)
        for token in () if leaves_none else excluded:
            mask[token >> 3] &= ~(1 << (token & 7))
        if constraint is None:
            return array("i", mask)
        own = int.from_bytes(constraint)
        left = own & int.from_bytes(mask) or own & int.from_bytes(self._allowed) or own
        return array("i", left.to_bytes(len(constraint)))

    def list_inputs(self, mask: array[int] | None) -> Iterator[tuple[str, array[Any]]]:
        """Yields the row's part of each input that is not idle, by name, with a mask that `make_mask` has made."""
        return chain(self.pairs.items(), [("cuts", self.cuts)], [] if mask is None else [("token_bitmask", mask)])

    def describe(self, row: int, mask: array[int] | None) -> ProcessedRow:
        """Describes the same for a host that changes the logits of a row."""
        pairs = {name: values.tobytes() for name, values in self.pairs.items()} if self._places else {}
        return ProcessedRow(row, pairs, None if mask is None else mask.tobytes(), tuple(self.cuts))

    @property
    def _keeps_history(self) -> bool:
        return bool(self._sampling.no_repeat_ngram_size or self._sampling.bad_words)

    def _remember(self, token: int) -> None:
        size = self._sampling.no_repeat_ngram_size
        self._history.append(token)
        if size and len(self._history) >= size:
            self._followers[tuple(self._history[-size:-1])].add(token)

    def _set(self, token: int, name: str, value: float) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            for one, idle in (("pair_ids", token), ("pair_bias", 0.0), ("pair_factor", 1.0), ("pair_penalty", 0.0)):
                self.pairs[one].append(idle)
        self.pairs[name][place] = value

    def _find_repeating(self) -> Collection[int]:
        size = self._sampling.no_repeat_ngram_size
        if not size or len(self._history) < size - 1:
            return ()
        return self._followers.get(tuple(self._history[len(self._history) - size + 1 :]), ())

    def _find_bad(self) -> list[int]:
        history = self._history
        return [
            word[-1]
            for word in self._sampling.bad_words
            if len(history) >= len(word) - 1 and tuple(history[len(history) - len(word) + 1 :]) == word[:-1]
        ]


def make_mask(allowed: Sequence[int], vocab_size: int) -> bytes:
    """Returns words with the bits of some tokens, or of all if none is named."""
    size = -(-vocab_size // WORD_BITS) * WORD_BITS // 8
    if not allowed:
        return b"\xff" * size
    mask = bytearray(size)
    for token in allowed:
        mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)
