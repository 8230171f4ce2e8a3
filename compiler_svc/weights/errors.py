"""Errors of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

from bundle.errors import FieldViolation, KilnError, Unsaid

#: Mistakes that one error names; it counts the others.
MAX_LISTED: Final = 64

#: The attribute that names the directory of quantized weights.
QUANTIZED_PATH: Final = "neuron_config.quantized_checkpoints_path"
#: The number of a layer in a tensor's name. Longer ones are no layers.
_NUMBER: Final = re.compile(r"\.(0|[1-9][0-9]{0,8})\.")


class CheckpointError(KilnError, code="INVALID_ARGUMENT", reason="CHECKPOINT_INVALID"):
    """Root of the errors of checkpoints."""


class CheckpointNotFound(CheckpointError, code="NOT_FOUND"):
    """A path that is not a checkpoint directory."""

    message = "no checkpoint: {violation}"
    violation = FieldViolation("{field}", "{path} ({detail})", "{accepted}")
    path: Path | str
    detail: str
    accepted: Unsaid[str]
    field: Unsaid[str] = "model"


class QuantizedCheckpointInvalid(CheckpointError):
    """A directory for the weights of a compile whose weights are not quantized, or not those of the model."""

    violation = FieldViolation(QUANTIZED_PATH, "{path} ({detail})", "{accepted}")
    path: Path | str
    detail: str
    accepted: Unsaid[str] = "a directory with quantized weights of the same model: safetensors or pickles"


class CheckpointInvalid(CheckpointError):
    """A checkpoint whose files, tensors or JSON are not what they should be.

    Attributes:
        subject: The first thing that is wrong: a file name, or a tensor's name.
    """

    def __init__(
        self, path: Path | str, subject: str, value: str, accepted: str, *, others: Sequence[FieldViolation] = ()
    ) -> None:
        violations = (FieldViolation(subject, value, accepted), *others)
        text = "; ".join(map(str, violations[:MAX_LISTED]))
        if len(violations) > MAX_LISTED:
            text += f"; and {len(violations) - MAX_LISTED} more"
        super().__init__(
            f"checkpoint {path} is invalid: {text}", violations=violations[:MAX_LISTED], path=path, subject=subject
        )
        self.subject = subject

    @classmethod
    def listing(cls, path: Path, violations: Iterable[FieldViolation]) -> Self:
        """Lists mistakes, at least one. Those that differ in the layer only become one: `layers.{0-31}.mlp`."""
        first, *others = join_layers(violations)
        return cls(path, first.field, first.value, first.accepted, others=others)


def join_layers(violations: Iterable[FieldViolation]) -> list[FieldViolation]:
    """Joins mistakes in names that differ in their first number only, and otherwise agree."""
    joined: dict[tuple[str, ...], list[FieldViolation]] = {}
    for one in violations:
        joined.setdefault((*split_number(one.field), one.value, one.accepted), []).append(one)
    return [
        FieldViolation(join_names(one.field for one in group), group[0].value, group[0].accepted)
        for group in joined.values()
    ]


def split_number(name: str) -> tuple[str, ...]:
    """What is before and after the first number of a name; the name if it has none."""
    parts = _NUMBER.split(name, maxsplit=1)
    return (parts[0], parts[-1]) if len(parts) > 1 else (name,)


def join_names(names: Iterable[str]) -> str:
    """Names that `split_number` splits alike, as one: `layers.{0-31}.mlp`."""
    first, *others = dict.fromkeys(names)
    if not others:
        return first
    before, after = split_number(first)
    numbers = sorted({int(_NUMBER.split(name, maxsplit=1)[1]) for name in (first, *others)})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return f"{before}.{{{text}}}.{after}"
