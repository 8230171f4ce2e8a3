"""A class states its error as data."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bundle.errors import FieldViolation, KilnError, Unsaid


class KindUnknown(KilnError, code="INVALID_ARGUMENT"):
    message = "no such kind: {violation}"
    violation = FieldViolation("kinds[{index:03}]", "{kind!r}", "{accepted}")
    kind: str
    index: int
    accepted: Unsaid[Sequence[str]] = ("{a}", "b")


class OldKindUnknown(KindUnknown, reason="KIND_OLD"):
    retry_after_s: float = 2.5


def test_texts_name_variables() -> None:
    error = KindUnknown("{x}", index=7)
    assert str(error) == "no such kind: kinds[007]: got '{x}'; accepted: {a}, b"
    assert error.violations == (FieldViolation("kinds[007]", "'{x}'", "{a}, b"),)
    assert error.metadata == {"kind": "{x}", "index": "7"}
    assert (error.index, error.accepted, error.retry_after_s) == (7, ("{a}", "b"), None)
    assert (KindUnknown.code, KindUnknown.reason) == ("INVALID_ARGUMENT", "KIND_UNKNOWN")


class TextRefused(KilnError):
    violation = FieldViolation("text", "{text}", "another", quotes_text=True)
    text: str


def test_logs_have_no_piece_of_a_prompt() -> None:
    error = TextRefused("secret")
    assert str(error) == "text: got secret; accepted: another"
    assert error.log_message == "text: got …; accepted: another"


def test_a_derived_class_adds_variables() -> None:
    error = OldKindUnknown("x", 1, ["y"], 5.0)
    assert (error.code, error.reason, error.retry_after_s) == ("INVALID_ARGUMENT", "KIND_OLD", 5.0)
    assert error.metadata == {"kind": "x", "index": "1"}
    assert OldKindUnknown("x", 1).retry_after_s == 2.5


@pytest.mark.parametrize("arguments", [(), ("x",), ("x", 1, [], 5.0)])
def test_arguments_are_counted(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match=r"argument"):
        KindUnknown(*arguments)  # type: ignore[arg-type]


def test_a_text_that_names_something_else_is_found_at_once() -> None:
    with pytest.raises(TypeError, match="texts of Misspelled name knid, which it does not have"):

        class Misspelled(KilnError):
            message = "no kind {knid}"
            kind: str
