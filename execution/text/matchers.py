"""Follows sequences through the grammars that they must match, and finds the tokens that may come next."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from execution.text.constraint import ConstrainedSequence, Constraint, NextTokens
from execution.text.tokenizer import Tokenizer

#: Grammars that stay built. Each takes some kilobytes, hostile ones some megabytes.
MAX_GRAMMARS: Final = 64
#: How long an answer waits for a grammar that is being built, which takes less than a millisecond as a rule.
_PATIENCE_S: Final = 0.002
_BITS: Final = 32
_EBNF_RULE: Final = "::="
_MAX_REASON_CHARS: Final = 300
#: Begins the reason of the library that nothing can follow.
_DEAD_END: Final = "NoExtension"

#: A step of a grammar within these takes a few milliseconds at most, and its memory some megabytes.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False
)


class ConstraintRefused(ValueError):
    """A constraint that is malformed, that no text matches, or that this code cannot keep exactly."""


@dataclass(slots=True)
class _Follower:
    """A sequence, as far as its tokens have come."""

    grammar: Future[LLMatcher]
    matcher: LLMatcher | None = None
    num_tokens: int = 0


class Matchers:
    """The grammars and sequences of one tokenizer. While a thread builds a grammar, sequences with others go on."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        """Takes a tokenizer, the size of the model's vocabulary, and the tokens that end a sequence, at least one.

        Raises ValueError if the tokenizer's decoder is of another kind than those that can be followed.
        """
        size = max(vocab_size, tokenizer.num_ids)
        self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=list(eos))
        self._mask_bytes = -(-vocab_size // _BITS) * (_BITS // 8)
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._grammars = OrderedDict[Constraint, Future[LLMatcher]]()
        self._followers: dict[int, _Follower] = {}

    def compile(self, constraint: Constraint) -> bytes:
        """Returns the mask of the first token; raises ConstraintRefused. It may take for ever, and any memory."""
        return self._mask(self._build(constraint))

    def follow(self, sequence: ConstrainedSequence) -> NextTokens:
        """Takes the newest tokens of a sequence."""
        follower = self._followers.get(sequence.number)
        if follower is None or sequence.start != follower.num_tokens:
            if sequence.constraint is None or sequence.start:
                return NextTokens("UNKNOWN")
            follower = self._followers[sequence.number] = _Follower(self._find(sequence.constraint))
        if follower.matcher is None:
            wait([follower.grammar], _PATIENCE_S)
            if not follower.grammar.done():
                return NextTokens("BUILDING")
        try:
            matcher = follower.matcher = follower.matcher or follower.grammar.result().deep_copy()
            follower.num_tokens += len(sequence.token_ids)
            # An error is a state of the object, and so of its next mask.
            matcher.consume_tokens(sequence.token_ids)
            return NextTokens("KNOWN", self._mask(matcher))
        except ConstraintRefused as error:
            return NextTokens("FAILED", detail=str(error))

    def forget(self, numbers: Sequence[int]) -> None:
        """Drops sequences that have ended."""
        for number in numbers:
            self._followers.pop(number, None)

    def _find(self, constraint: Constraint) -> Future[LLMatcher]:
        found = self._grammars.get(constraint)
        if found is None:
            found = self._grammars[constraint] = self._builder.submit(self._build, constraint)
        self._grammars.move_to_end(constraint)
        if len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        return found

    def _build(self, constraint: Constraint) -> LLMatcher:
        try:
            grammar = write_grammar(constraint)
        except MemoryError:
            raise
        # What reads EBNF raises plain Exception.
        except Exception as error:
            raise ConstraintRefused(_shorten(str(error))) from error
        # Its errors are states of the object. It leaves other threads the interpreter meanwhile.
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ConstraintRefused(_shorten(matcher.get_error()))
        return matcher

    def _mask(self, matcher: LLMatcher) -> bytes:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error()
            raise ConstraintRefused("no text matches it" if _DEAD_END in reason else _shorten(reason))
        mask = mask[: self._mask_bytes]
        if mask.count(0) == len(mask):
            raise ConstraintRefused("the model has no token that may come next")
        return mask


def write_grammar(constraint: Constraint) -> str:
    """Writes a constraint as the library reads it; raises ValueError if that shows that it is malformed."""
    match constraint.kind:
        case "json_schema":
            return _write_schema(_parse_schema(constraint.text), constraint)
        case "json_object":
            return _write_schema({"type": "object"}, constraint)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "grammar":
            is_ebnf = _EBNF_RULE in constraint.text
            return LLMatcher.grammar_from_lark(gbnf_to_lark(constraint.text) if is_ebnf else constraint.text)
        case "choices":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.choices)))


def _parse_schema(text: str) -> Mapping[str, Any]:
    schema = json.loads(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConstraintRefused("no value matches false" if schema is False else "a schema is an object")
    return schema


def _write_schema(schema: Mapping[str, Any], constraint: Constraint) -> str:
    # What a schema says to the library itself, under `x-guidance`, must not loosen it.
    return LLMatcher.grammar_from_json_schema(
        dict(schema),
        overrides={
            "item_separator": ",",
            "key_separator": ":",
            "whitespace_flexible": constraint.json_whitespace,
            "coerce_one_of": False,
            "lenient": False,
        },
    )


def _shorten(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:_MAX_REASON_CHARS]
