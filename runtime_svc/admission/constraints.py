"""Validates the constraint of a Generate call, and names its field in the errors of those that compile it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bundle.errors import FieldViolation, KilnError
from execution.text.constraint import Constraint
from execution.text.errors import TextInvalid, TextLimitExceeded, TextRefused
from runtime_svc.admission.quotes import quote_value
from runtime_svc.errors import ConstraintLimitExceeded, FeatureNotServed, RequestInvalid
from runtime_svc.text.codec import TextCodec

#: Characters of a constraint. What takes long to compile may be much shorter.
MAX_CONSTRAINT_CHARS: Final = 256 << 10
MAX_CHOICES: Final = 1024


def find_constraint_violations(constraint: Constraint) -> Iterator[FieldViolation]:
    """Names what no constraint may be."""
    path = f"constraint.{constraint.kind}"
    match constraint.kind:
        case "choices" if not 1 <= len(constraint.choices) <= MAX_CHOICES:
            # A constraint that sets nothing comes as this.
            accepted = f"1 to {MAX_CHOICES} texts, or another constraint"
            yield FieldViolation(f"{path}.texts", f"{len(constraint.choices)} texts", accepted)
        case "json_schema" | "regex" | "grammar" | "structural_tag" if not constraint.text:
            yield FieldViolation(path, "''", "at least one character")
    if constraint.size > MAX_CONSTRAINT_CHARS:
        yield FieldViolation(path, f"{constraint.size} characters", f"at most {MAX_CONSTRAINT_CHARS} characters")


async def compile_constraint(constraint: Constraint, text: TextCodec) -> bytes:
    """Returns the mask of the first token; errors of the process that compiles become errors of a call's field."""
    try:
        return await text.compile(constraint)
    except (TextRefused, TextLimitExceeded, TextInvalid) as error:
        given = quote_value(constraint.text or ", ".join(constraint.choices))
        raise name_field(error, f"constraint.{constraint.kind}", given) from error


def name_field(error: TextRefused | TextLimitExceeded | TextInvalid, field: str, given: str) -> KilnError:
    """Makes the error of a call's field, whose value is `given`, of one of the process that compiles."""
    match error:
        case TextRefused():
            accepted = f"a constraint that can be kept: {error.detail}"
            return RequestInvalid([FieldViolation(field, given, accepted, quotes_text=True)])
        case TextLimitExceeded():
            return ConstraintLimitExceeded(field, error.limit)
        case TextInvalid():
            accepted = f"unset: the bundle's tokenizer is of a kind without constraints: {error.detail}"
            return FeatureNotServed([FieldViolation(field, "set", accepted)])
