"""Checks deployment ids, bundle references, thread counts and latencies of calls and of the deployments file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from bundle.errors import FieldViolation, RefInvalid
from bundle.reference import ACCEPTED_REF, parse_reference
from edge.request_id import NO_DOTS, NO_DOTS_ACCEPTED
from runtime_svc.deployments.deployment_spec import DeploymentSpec
from runtime_svc.errors import RequestInvalid

DEPLOYMENT_ID: Final = re.compile(rf"{NO_DOTS}[a-z0-9._-]{{1,64}}")
MAX_THREADS_PER_CORE: Final = 256


def check_spec(spec: DeploymentSpec) -> None:
    """Checks the specification of a LoadBundle call."""
    violations = [*spec_violations(spec)]
    if violations:
        raise RequestInvalid(violations)


def spec_violations(spec: DeploymentSpec) -> Iterator[FieldViolation]:
    """Yields every malformed field of a specification; `CorePool.reserve` checks the cores."""
    if DEPLOYMENT_ID.fullmatch(spec.deployment_id) is None:
        accepted = f"1 to 64 lower-case letters, digits, '.', '_', '-'; {NO_DOTS_ACCEPTED}"
        yield FieldViolation("deployment_id", repr(spec.deployment_id), accepted)
    yield from _ref_violations(spec)
    threads = spec.threads_per_core
    if threads is not None and not 1 <= threads <= MAX_THREADS_PER_CORE:
        yield FieldViolation("threads_per_core", str(threads), f"1 to {MAX_THREADS_PER_CORE}")
    target_s = spec.target_inter_token_latency_s
    # NaN, which a deployments file may have, is not above 0 either.
    if target_s is not None and not 0 < target_s < math.inf:
        yield FieldViolation("target_inter_token_latency", f"{target_s:g} s", "more than 0 s")


def check_ref(ref: str) -> None:
    """Checks a bundle reference."""
    try:
        parse_reference(ref)
    except RefInvalid as error:
        raise RequestInvalid([FieldViolation("ref", repr(ref), ACCEPTED_REF)]) from error


def _ref_violations(spec: DeploymentSpec) -> Iterator[FieldViolation]:
    try:
        reference = parse_reference(spec.ref)
    except RefInvalid:
        yield FieldViolation("ref", repr(spec.ref), ACCEPTED_REF)
        return
    if spec.follow_alias and reference.alias is None:
        yield FieldViolation("ref", repr(spec.ref), "NAME@ALIAS, because follow_alias is set")
