"""What the text of a sequence must match, and what the process that knows the grammar says of it."""

from __future__ import annotations

from typing import Literal

import msgspec

#: Of a GenerateRequest's `constraint`, the field that is set.
Kind = Literal["json_schema", "json_object", "regex", "grammar", "choices", "structural_tag"]


class ConstraintRefused(ValueError):
    """A constraint that is malformed, that no text matches, or that this code cannot keep exactly."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint as a client writes it.

    Attributes:
        text: The JSON schema, the regular expression, the grammar in Lark or EBNF, or the structural tag in JSON;
            empty for other kinds.
        choices: The texts of which the sequence is one.
        json_whitespace: Whether JSON may have white space where JSON allows it; without, there is none.
    """

    kind: Kind
    text: str = ""
    choices: tuple[str, ...] = ()
    json_whitespace: bool = False

    @property
    def size(self) -> int:
        """Its length in characters."""
        return len(self.text) + sum(map(len, self.choices))


class ConstrainedSequence(msgspec.Struct, frozen=True):
    """The newest tokens of a sequence.

    Attributes:
        number: Tells it from all other sequences that are followed.
        start: Its generated tokens before the newest ones.
        token_ids: The newest ones.
        constraint: None if the process has got it with earlier tokens.
    """

    number: int
    start: int
    token_ids: list[int]
    constraint: Constraint | None = None


class NextTokens(msgspec.Struct, frozen=True):
    """The tokens that may come next in a sequence.

    Attributes:
        state: KNOWN comes with `mask`, FAILED with `detail`. While the grammar is BUILDING, the process is to be asked
            again. UNKNOWN is a sequence that the process has not got from its first token on. UNSPELLED is one behind
            which the constraint wants text that no tokens have: `detail` is its first character, if that is known.
        mask: int32 words [⌈vocabulary / 32⌉] in the order of the machine's bytes; bit i of word w is set if the token
            32 w + i is allowed.
        forced: The tokens that come next, since the constraint allows no others; `mask` is for the token behind them.
        detail: What the sequence has reached.
    """

    state: Literal["KNOWN", "BUILDING", "UNKNOWN", "FAILED", "UNSPELLED"]
    mask: bytes = b""
    forced: list[int] = []
    detail: str = ""
