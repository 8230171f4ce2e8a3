"""Follows sequences through the grammars that they must match, and finds the tokens that may come next."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from execution.text.constraint import ConstrainedSequence, Constraint, ConstraintRefused, NextTokens
from execution.text.json_schemas import parse_schema, read_grammar, write_schema
from execution.text.lark import quote
from execution.text.structural_tags import write_structural_tag
from execution.text.tokenizer import Tokenizer
from execution.text.vocabulary import Vocabulary

#: Grammars that stay built. Each takes some kilobytes, hostile ones some megabytes.
MAX_GRAMMARS: Final = 64
#: How long an answer waits for a grammar that is being built, which takes less than a millisecond as a rule.
_PATIENCE_S: Final = 0.002
#: Forced tokens behind which an answer finds no more. Texts of a schema may be long, and steps have room for few.
MAX_FORCED: Final = 128
_BITS: Final = 32
_EBNF_RULE: Final = "::="
_MAX_REASON_CHARS: Final = 300
#: Name of a grammar within another.
_INNER: Final = "inner"
#: Begins the reason of the library that nothing can follow.
_DEAD_END: Final = "NoExtension"
#: A special token among bytes of the library.
_SPECIAL: Final = re.compile(rb"\xff\[\d+\]")

#: A step of a grammar within these takes a few milliseconds at most, and its memory some megabytes.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False
)


@dataclass(frozen=True, slots=True)
class _Grammar:
    """The beginning of every sequence with one constraint.

    Attributes:
        plain: What matches the text.
        stripped: What matches the text behind what the decoder takes off; None if it takes nothing off.
    """

    plain: LLMatcher
    stripped: LLMatcher | None


@dataclass(slots=True)
class _Follower:
    """A sequence, as far as its tokens have come; it has a matcher from its first token on."""

    grammar: Future[_Grammar]
    matcher: LLMatcher | None = None
    num_tokens: int = 0


class Matchers:
    """The grammars and sequences of one tokenizer. While a thread builds a grammar, sequences with others go on."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        """Takes a tokenizer, the size of the model's vocabulary, and the tokens that end a sequence, at least one.

        Raises ValueError if what a token adds to a text depends on more than the token.
        """
        self._vocabulary = Vocabulary(tokenizer, max(vocab_size, tokenizer.num_ids), eos)
        self._vocab_size, self._eos = vocab_size, frozenset(eos)
        self._num_bytes = -(-vocab_size // _BITS) * (_BITS // 8)
        self._all = (1 << vocab_size) - 1
        self._stripped = _make_mask(filter(self._vocabulary.strips, range(vocab_size)))
        self._special = _make_mask(self._vocabulary.special_token_ids)
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._grammars = OrderedDict[Constraint, Future[_Grammar]]()
        self._followers: dict[int, _Follower] = {}

    def compile(self, constraint: Constraint) -> bytes:
        """Returns the mask of the first token; raises ConstraintRefused. It may take for ever, and any memory."""
        grammar = self._build(constraint)
        # Where there are several texts, it begins none that tokens do not have.
        unspelled = [
            self._vocabulary.find_unspelled(text) for text in constraint.choices or [_read_forced(grammar.plain)]
        ]
        if all(unspelled):
            raise ConstraintRefused(f"no token of the model has {unspelled[0]!r}")
        return self._find_first(grammar)

    def follow(self, sequence: ConstrainedSequence) -> NextTokens:
        """Takes the newest tokens of a sequence."""
        follower, tokens = self._followers.get(sequence.number), sequence.token_ids
        if follower is None or sequence.start != follower.num_tokens:
            if sequence.constraint is None or sequence.start:
                return NextTokens("UNKNOWN")
            follower = self._followers[sequence.number] = _Follower(self._find(sequence.constraint))
        if follower.matcher is None:
            wait([follower.grammar], _PATIENCE_S)
            if not follower.grammar.done():
                return NextTokens("BUILDING")
        try:
            if follower.matcher is None:
                grammar = follower.grammar.result()
                if not tokens:
                    return NextTokens("KNOWN", self._find_first(grammar))
                stripped = grammar.stripped if self._vocabulary.strips(tokens[0]) else None
                follower.matcher = (grammar.plain if stripped is None else stripped).deep_copy()
            follower.num_tokens += len(tokens)
            # An error is a state of the object, and so of its next mask.
            follower.matcher.consume_tokens(tokens)
            forced, mask = self._run_ahead(follower.matcher)
            if not mask:
                return NextTokens("UNSPELLED", detail=self._vocabulary.find_unspelled(_read_forced(follower.matcher)))
            follower.num_tokens += len(forced)
            return NextTokens("KNOWN", self._pack(mask), forced)
        except ConstraintRefused as error:
            return NextTokens("FAILED", detail=str(error))

    def forget(self, numbers: Sequence[int]) -> None:
        """Drops sequences that have ended."""
        for number in numbers:
            self._followers.pop(number, None)

    def _find(self, constraint: Constraint) -> Future[_Grammar]:
        found = self._grammars.get(constraint)
        if found is None:
            found = self._grammars[constraint] = self._builder.submit(self._build, constraint)
        self._grammars.move_to_end(constraint)
        if len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        return found

    def _build(self, constraint: Constraint) -> _Grammar:
        try:
            grammar = write_grammar(constraint, self._vocabulary.special_ids)
        except MemoryError:
            raise
        # What reads EBNF raises plain Exception.
        except Exception as error:
            raise ConstraintRefused(_shorten(str(error))) from error
        stripped = self._vocabulary.stripped
        return _Grammar(self._match([grammar]), self._match(_put_behind(stripped, grammar)) if stripped else None)

    def _match(self, grammars: list[dict[str, Any]]) -> LLMatcher:
        # Its errors are states of the object. It leaves other threads the interpreter meanwhile.
        written = json.dumps({"grammars": grammars})
        matcher = LLMatcher(self._vocabulary.library, written, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ConstraintRefused(_shorten(matcher.get_error()))
        return matcher

    def _find_first(self, grammar: _Grammar) -> bytes:
        mask = self._mask(grammar.plain)
        # The decoder would take a space before a special token off, and no chat template writes one.
        is_special = mask and not mask & ~self._special
        if grammar.stripped is not None and not is_special:
            # Not every token that begins with the character loses it.
            mask = mask & ~self._stripped | self._mask(grammar.stripped) & self._stripped
        return self._pack(mask)

    def _run_ahead(self, matcher: LLMatcher) -> tuple[list[int], int]:
        """Takes tokens while the grammar allows a single one; returns them, and the mask of the token behind.

        If the sequence has to end, the token that ends it comes last.
        """
        forced: list[int] = []
        while True:
            mask = self._mask(matcher)
            # A mask of a single token is a power of two.
            only = mask.bit_length() - 1
            if not mask or mask & (mask - 1) or len(forced) >= MAX_FORCED:
                return forced, mask
            if only in self._eos:
                return [*forced, only], mask
            # All of a forced text at once: for each mask the library makes tokens of what is left of it.
            text = takewhile(lambda token: token < self._vocab_size, matcher.compute_ff_tokens()[:MAX_FORCED])
            tokens = [*text] or [only]
            matcher.consume_tokens(tokens)
            forced += tokens

    def _mask(self, matcher: LLMatcher) -> int:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error()
            raise ConstraintRefused("no text matches it" if _DEAD_END in reason else _shorten(reason))
        return int.from_bytes(mask[: self._num_bytes], "little") & self._all

    def _pack(self, mask: int) -> bytes:
        if not mask:
            raise ConstraintRefused("the model has no token that may come next")
        return mask.to_bytes(self._num_bytes, "little")


def write_grammar(constraint: Constraint, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """Writes a constraint as the library reads one of several grammars.

    `special_ids` are the tokens that are no text. Raises ValueError if that shows that the constraint is malformed.
    """
    has_whitespace = constraint.json_whitespace
    match constraint.kind:
        case "json_schema":
            return write_schema(parse_schema(constraint.text), has_whitespace=has_whitespace)
        case "json_object":
            return write_schema({"type": "object"}, has_whitespace=has_whitespace)
        case "regex":
            return read_grammar(LLMatcher.grammar_from_regex(constraint.text))
        case "grammar":
            is_ebnf = _EBNF_RULE in constraint.text
            return {"lark_grammar": gbnf_to_lark(constraint.text) if is_ebnf else constraint.text}
        case "choices":
            return {"lark_grammar": "start: " + " | ".join(map(quote, constraint.choices))}
        case "structural_tag":
            return {"lark_grammar": write_structural_tag(constraint.text, special_ids, has_whitespace=has_whitespace)}


def _put_behind(text: str, grammar: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"lark_grammar": f"start: {quote(text)} @{_INNER}"}, {**grammar, "name": _INNER}]


def _read_forced(matcher: LLMatcher) -> str:
    """Returns the text that has to come next, without special tokens and the beginning of a character."""
    return _SPECIAL.sub(b"", matcher.compute_ff_bytes()).decode(errors="ignore")


def _make_mask(token_ids: Iterable[int]) -> int:
    mask = bytearray()
    for token_id in token_ids:
        mask += bytes(token_id // 8 + 1 - len(mask))
        mask[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(mask, "little")


def _shorten(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:_MAX_REASON_CHARS]
