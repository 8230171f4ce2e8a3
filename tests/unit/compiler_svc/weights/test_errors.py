"""One error names all mistakes of a checkpoint, in few words however many layers share them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundle.errors import FieldViolation
from compiler_svc.weights.errors import MAX_LISTED, CheckpointInvalid

PATH = Path("/models/one")


def listed(*fields: str, value: str = "missing") -> list[str]:
    violations = [FieldViolation(field, value, "a tensor") for field in fields]
    return [one.field for one in CheckpointInvalid.listing(PATH, violations).violations]


@pytest.mark.parametrize(
    ("fields", "joined"),
    [
        (["model.layers.3.mlp.up"], ["model.layers.3.mlp.up"]),
        (["a.2.w", "a.0.w", "a.1.w"], ["a.{0-2}.w"]),
        (["a.0.w", "a.2.w", "a.3.w", "a.7.w"], ["a.{0,2-3,7}.w"]),
        (["a.0.w", "b.0.w", "a.1.w", "b.1.w"], ["a.{0-1}.w", "b.{0-1}.w"]),
        (["a.0.e.0.w", "a.1.e.0.w", "a.0.e.1.w"], ["a.{0-1}.e.0.w", "a.0.e.1.w"]),
        (["a.0.w", "a.00.w", "a.w"], ["a.0.w", "a.00.w", "a.w"]),
    ],
)
def test_layers_are_joined(fields: list[str], joined: list[str]) -> None:
    assert listed(*fields) == joined


def test_different_mistakes_stay_apart() -> None:
    one, other = FieldViolation("a.0.w", "missing", "x"), FieldViolation("a.1.w", "shape [1]", "x")
    error = CheckpointInvalid.listing(PATH, [one, other])
    assert error.violations == (one, other)
    assert str(error) == f"checkpoint /models/one is invalid: {one}; {other}"
    assert error.subject == "a.0.w"


def test_what_is_not_listed_is_counted() -> None:
    fields = [f"t{number}" for number in range(MAX_LISTED + 5)]
    error = CheckpointInvalid.listing(PATH, [FieldViolation(field, "missing", "x") for field in fields])
    assert len(error.violations) == MAX_LISTED
    assert str(error).endswith("; and 5 more")
