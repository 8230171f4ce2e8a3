"""Names that clients give: deployment ids and bundle references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from bundle.errors import FieldViolation, RefInvalid
from bundle.reference import ACCEPTED_REF, parse_reference
from runtime_svc.errors import RequestInvalid

DEPLOYMENT_ID: Final = re.compile(r"[a-z0-9._-]{1,64}")


def check_new_deployment(deployment_id: str, ref: str) -> None:
    """Checks what LoadBundle names.

    Raises:
        RequestInvalid: Every name that is malformed.
    """
    violations = [*_id_violations(deployment_id), *_ref_violations(ref)]
    if violations:
        raise RequestInvalid(violations)


def check_ref(ref: str) -> None:
    """Checks a bundle reference.

    Raises:
        RequestInvalid: It is none.
    """
    violations = [*_ref_violations(ref)]
    if violations:
        raise RequestInvalid(violations)


def _id_violations(deployment_id: str) -> Iterator[FieldViolation]:
    if DEPLOYMENT_ID.fullmatch(deployment_id) is None:
        accepted = "1 to 64 lower-case letters, digits, '.', '_', '-'"
        yield FieldViolation("deployment_id", repr(deployment_id), accepted)


def _ref_violations(ref: str) -> Iterator[FieldViolation]:
    try:
        parse_reference(ref)
    except RefInvalid:
        yield FieldViolation("ref", repr(ref), ACCEPTED_REF)
