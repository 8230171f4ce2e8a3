"""Errors of the golden check."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.errors import KilnError


class ReferenceFailed(KilnError, code="FAILED_PRECONDITION"):
    """A checkpoint whose model transformers does not compute, so that the golden check has nothing to compare with."""

    def __init__(self, reference: str, detail: str, attributes: Sequence[str]) -> None:
        ignored = ", ".join(attributes)
        read = f"; it reads attributes of config.json that the model's family ignores: {ignored}" if ignored else ""
        message = f"{reference}, the reference of the golden check, fails on this checkpoint: {detail}{read}"
        super().__init__(message, reference=reference, detail=detail, attributes=ignored)


class GoldenMismatch(KilnError, code="INTERNAL"):
    """An executable that does not compute what the reference computes."""

    message = "executable {tag} differs from the reference at position {position}: {detail}"
    tag: str
    position: int
    detail: str
