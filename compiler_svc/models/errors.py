"""Errors of model configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bundle.errors import FieldViolation, KilnError

#: The value of an attribute that is not there.
NOTHING: Final = "nothing"


class ModelError(KilnError, code="INVALID_ARGUMENT", reason="MODEL_CONFIG_INVALID"):
    """Root of the errors of model configurations."""


class ModelConfigInvalid(ModelError):
    """A `config.json` with missing or impossible attributes."""

    def __init__(self, violations: Sequence[FieldViolation], *, family: str = "") -> None:
        """Takes all mistakes, and the family of models whose attributes are missing among them."""
        text = "; ".join(map(str, violations))
        missing = ", ".join(one.field for one in violations if one.value == NOTHING and "." not in one.field)
        if family and missing:
            text = f"the configuration of a {family} model must define {missing}: {text}"
            super().__init__(
                f"config.json is invalid: {text}", violations=tuple(violations), family=family, missing=missing
            )
        else:
            super().__init__(f"config.json is invalid: {text}", violations=tuple(violations))


class ModelNotServed(ModelError, reason="FEATURE_NOT_SERVED"):
    """An architecture or attribute that this compiler does not build."""

    message = "the model is not served: {violations}"
    violations: Sequence[FieldViolation]
