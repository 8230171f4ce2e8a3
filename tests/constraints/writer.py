"""Writes text that constraints let through, token by token, as a model without a preference would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Final

import numpy as np

from execution.text.constraint import ConstrainedSequence, Constraint, NextTokens
from execution.text.matchers import Matchers
from execution.text.tokenizer import Tokenizer


class Writer:
    """Draws allowed tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self.tokenizer: Final = tokenizer
        self.matchers: Final = Matchers(tokenizer, vocab_size, eos)
        self._vocab_size, self._ends = vocab_size, [[token] for token in eos]
        # Numbers of sequences that no test gives.
        self._numbers = count(1 << 20)

    def allowed(self, mask: bytes) -> list[int]:
        """Returns the tokens of a mask."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._vocab_size]).tolist()

    def follow(self, number: int, start: int, tokens: list[int], constraint: Constraint | None = None) -> NextTokens:
        """Returns what may come next; waits for the grammar."""
        sequence = ConstrainedSequence(number, start, tokens, constraint)
        while (found := self.matchers.follow(sequence)).state == "BUILDING":
            pass
        return found

    def draw(self, constraint: Constraint, seed: int, max_tokens: int, begin: Sequence[int] = ()) -> list[int] | None:
        """Returns the tokens of a text that begins with some; None if it has not ended after so many."""
        drawn, tokens, number = random.Random(seed), list[int](), next(self._numbers)
        mask = self.matchers.compile(constraint)
        while len(tokens) < max_tokens and tokens[-1:] not in self._ends:
            choices = self.allowed(mask)
            # What is forced draws no number, whether it comes as a mask or with the token before.
            token = choices[0] if len(choices) == 1 else drawn.choice(choices)
            if len(tokens) < len(begin):
                token = begin[len(tokens)]
            assert token in choices, (self.tokenizer.decode(tokens), token)
            tokens.append(token)
            if [token] not in self._ends:
                found = self.follow(number, len(tokens) - 1, [token], constraint if len(tokens) == 1 else None)
                assert found.state == "KNOWN", found
                tokens += found.forced
                assert tokens[: len(begin)] == [*begin[: len(tokens)]], (self.tokenizer.decode(tokens), begin)
                mask = found.mask
        self.matchers.forget([number])
        return tokens[:-1] if tokens[-1:] in self._ends else None

    def write(self, constraint: Constraint, seed: int, max_tokens: int, begin: str = "") -> str | None:
        """Returns the text of what `draw` returns, for one that begins with `begin`."""
        ids = self.tokenizer.encode(begin, add_special_tokens=False)
        tokens = self.draw(constraint, seed, max_tokens, ids)
        return None if tokens is None else self.tokenizer.decode(tokens, skip_special_tokens=False)

    def lets_through(self, constraint: Constraint, text: str) -> bool:
        """Tells whether a sequence may consist of a text."""
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), *self._ends[0]]
        try:
            return self.draw(constraint, 0, len(tokens), tokens) is not None
        except AssertionError:
            return False
