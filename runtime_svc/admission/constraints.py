"""Validates the constraint of a Generate call, and names its field in the errors of those that compile it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bundle.errors import FieldViolation, KilnError
from execution.sampling_parameters import Need
from execution.text.constraint import Constraint
from execution.text.errors import TextInvalid, TextLimitExceeded, TextRefused
from runtime_svc.admission.quotes import quote_value
from runtime_svc.errors import ConstraintLimitExceeded, FeatureNotServed, RequestInvalid
from runtime_svc.text.codec import TextCodec

#: Characters of a constraint. What takes long to compile may be much shorter.
MAX_CONSTRAINT_CHARS: Final = 256 << 10
MAX_CHOICES: Final = 1024


def find_constraint_violations(
    constraint: Constraint, sampling: Mapping[str, Any], *, ignore_eos: bool
) -> Iterator[FieldViolation]:
    """Names what no constraint may be, and what cannot be kept beside one."""
    path = f"constraint.{constraint.kind}"
    match constraint.kind:
        case "choices" if not 1 <= len(constraint.choices) <= MAX_CHOICES:
            yield FieldViolation(f"{path}.texts", f"{len(constraint.choices)} texts", f"1 to {MAX_CHOICES} texts")
        case "json_schema" | "regex" | "grammar" if not constraint.text:
            yield FieldViolation(path, "''", "at least one character")
    if constraint.size > MAX_CONSTRAINT_CHARS:
        yield FieldViolation(path, f"{constraint.size} characters", f"at most {MAX_CONSTRAINT_CHARS} characters")
    if ignore_eos:
        yield FieldViolation("stop.ignore_eos", "true", "false, beside constraint: the sequence ends where that ends")
    if forced := sampling.get("forced_token_ids"):
        yield FieldViolation("sampling.forced_token_ids", quote_value(forced), "unset, beside constraint")


def find_unserved_constraint(constraint: Constraint, *, has_text: bool, has_ends: bool) -> Iterator[FieldViolation]:
    """Says what a bundle that serves no constraints lacks."""
    if not has_text:
        lacking = "the bundle has no tokenizer"
    elif not has_ends:
        lacking = "the bundle has no end-of-sequence token"
    else:
        lacking = Need.PROCESSORS.value
    yield FieldViolation(f"constraint.{constraint.kind}", "set", f"unset: {lacking}")


async def compile_constraint(constraint: Constraint, text: TextCodec) -> bytes:
    """Returns the mask of the first token; errors of the process that compiles become errors of a call's field."""
    try:
        return await text.compile(constraint)
    except (TextRefused, TextLimitExceeded, TextInvalid) as error:
        raise _name_field(error, constraint) from error


def _name_field(error: TextRefused | TextLimitExceeded | TextInvalid, constraint: Constraint) -> KilnError:
    field = f"constraint.{constraint.kind}"
    match error:
        case TextRefused():
            given = quote_value(constraint.text or ", ".join(constraint.choices))
            accepted = f"a constraint that can be kept: {error.detail}"
            return RequestInvalid([FieldViolation(field, given, accepted, quotes_text=True)])
        case TextLimitExceeded():
            return ConstraintLimitExceeded(field, error.limit)
        case TextInvalid():
            accepted = f"unset: the bundle's tokenizer is of a kind without constraints: {error.detail}"
            return FeatureNotServed([FieldViolation(field, "set", accepted)])
