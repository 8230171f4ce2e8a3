"""Errors of model configurations.

KilnError
└── ModelError
    ├── ModelConfigInvalid    a `config.json` with missing or impossible attributes
    └── ModelNotServed        an architecture or attribute that this compiler does not build
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bundle.errors import FieldViolation, KilnError

#: The value of an attribute that is not there.
NOTHING: Final = "nothing"


class ModelError(KilnError):
    """Root of the errors of model configurations."""

    reason = "MODEL_CONFIG_INVALID"


class ModelConfigInvalid(ModelError):
    """A `config.json` with missing or impossible attributes."""

    reason = "MODEL_CONFIG_INVALID"

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


class ModelNotServed(ModelError):
    """An architecture or attribute that this compiler does not build."""

    reason = "FEATURE_NOT_SERVED"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        text = "; ".join(map(str, violations))
        super().__init__(f"the model is not served: {text}", violations=tuple(violations))
