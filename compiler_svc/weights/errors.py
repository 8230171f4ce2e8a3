"""Errors of checkpoints.

KilnError
└── CheckpointError
    ├── CheckpointNotFound    a path that is not a checkpoint directory
    └── CheckpointInvalid     a checkpoint whose files, tensors or JSON are not what they should be
"""

from __future__ import annotations

from pathlib import Path

from bundle.errors import FieldViolation, KilnError


class CheckpointError(KilnError):
    """Root of the errors of checkpoints."""

    reason = "CHECKPOINT_INVALID"


class CheckpointNotFound(CheckpointError):
    """A path that is not a checkpoint directory."""

    reason = "CHECKPOINT_NOT_FOUND"

    def __init__(self, path: Path, detail: str, accepted: str) -> None:
        violation = FieldViolation("model", f"{path} ({detail})", accepted)
        super().__init__(f"no checkpoint: {violation}", violations=(violation,), path=path, detail=detail)


class CheckpointInvalid(CheckpointError):
    """A checkpoint whose files, tensors or JSON are not what they should be.

    Attributes:
        subject: What is wrong: a file name, or a tensor's name.
    """

    reason = "CHECKPOINT_INVALID"

    def __init__(self, path: Path, subject: str, value: str, accepted: str) -> None:
        violation = FieldViolation(subject, value, accepted)
        super().__init__(
            f"checkpoint {path} is invalid: {violation}", violations=(violation,), path=path, subject=subject
        )
        self.subject = subject
