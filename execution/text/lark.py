"""Writes the parts of grammars in Lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from execution.text.constraint import ConstraintRefused
from execution.text.json_schemas import accept_schema, write_schema

#: Text without bound, in UTF-8.
_ANY: Final = "/(?s:.*)/"
_ESCAPED_OR_SLASH: Final = re.compile(r"\\.|/|\n", re.DOTALL)


def quote(text: str) -> str:
    """Returns a text as Lark quotes it."""
    return json.dumps(text, ensure_ascii=False)


class LarkWriter:
    """Makes expressions, and keeps the rules that they name."""

    def __init__(self, special_ids: Mapping[str, int], *, has_whitespace: bool) -> None:
        """Takes the tokens that are no text, and whether JSON may have any white space."""
        self._rules: list[str] = []
        self._special_ids = special_ids
        # The longest first: one may begin with another.
        spellings = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._has_whitespace = has_whitespace

    def finish(self, expression: str) -> str:
        """Returns the grammar of an expression."""
        return "\n".join([f"start: {expression}", *self._rules])

    def literal(self, text: str) -> str:
        """Makes the expression of a text; where it spells a special token, it is that token."""
        return self.join(self.split(text))

    def split(self, text: str) -> list[str | int]:
        """Returns what a text consists of: texts that are not empty, and ids of special tokens."""
        pieces, begin = list[str | int](), 0
        for found in self._special.finditer(text) if self._special else ():
            pieces += [text[begin : found.start()], self._special_ids[found[0]]]
            begin = found.end()
        return [piece for piece in (*pieces, text[begin:]) if piece != ""]

    def join(self, pieces: Sequence[str | int]) -> str:
        """Makes the expression of what `split` returns."""
        written = [f"<[{piece}]>" if isinstance(piece, int) else quote(piece) for piece in pieces]
        return " ".join(written) or quote("")

    def text(self, excludes: Sequence[str]) -> str:
        """Makes the expression of any text that contains none of some texts."""
        if not all(excludes):
            raise ConstraintRefused("a trigger or an excluded text is empty")
        excluded = " | ".join(map(quote, excludes))
        return self._name("TEXT", f"{_ANY} & ~({_ANY} ({excluded}) {_ANY})" if excludes else _ANY)

    def text_until(self, text: str, end: str) -> str:
        """Makes the expression of `text`, made by `text`, that ends where it first has `end`."""
        return self._name("until", text, f"[suffix={quote(end)}]")

    def regex(self, pattern: str) -> str:
        """Makes the expression of what a regular expression matches."""
        return self._name("REGEX", f"/{_ESCAPED_OR_SLASH.sub(_escape, pattern)}/")

    def schema(self, schema: dict[str, Any] | bool) -> str:
        """Makes the expression of JSON of a schema, with a space behind commas and colons."""
        written = write_schema(accept_schema(schema), has_whitespace=self._has_whitespace, is_spaced=True)
        return self._name("json", f"%json {json.dumps(written['json_schema'])}")

    def any_of(self, expressions: Sequence[str]) -> str:
        """Makes the expression of one of some."""
        if not expressions:
            raise ConstraintRefused("there are no tags, or no elements")
        return f"({' | '.join(expressions)})"

    def _name(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name


def _escape(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
