"""Records of what builds have cost, and of which executables plans led to. Functions take the session of the caller's
transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from compiler_svc.database.cache import CachedExecutable
from compiler_svc.database.tables import BuildActualRow, CachedExecutableRow, LoweringActualRow, PlannedExecutableRow

#: Newest records of each kind that an estimate reads.
_MAX_READ = 256


class LoweringActual(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one lowering; its peak memory is that of any lowering process of the same build."""

    submodel: str
    num_layers: int
    duration_s: float
    peak_memory_bytes: int


class BuildActual(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one build, besides its lowerings: all executables count, including those from the cache, and weights
    of all ranks; `rest_s` is the time of everything except tracing and lowering.
    """

    num_layers: int
    num_executables: int
    weights_bytes: int
    trace_s: float
    rest_s: float


class BuildFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a build reports about itself, with the action digest of every executable by plan digest."""

    target_kind: str
    optimization_level: int
    action_digests: Mapping[str, str]
    lowerings: Mapping[str, LoweringActual]
    build: BuildActual


def remember_facts(session: Session, bundle_digest: str, facts: BuildFacts) -> None:
    """Records a build's facts. Newer facts replace older ones of the same executables and bundle."""
    now = time.time_ns()
    for plan_digest, action_digest in facts.action_digests.items():
        session.merge(PlannedExecutableRow(plan_digest=plan_digest, action_digest=action_digest))
    for action_digest, lowering in facts.lowerings.items():
        session.merge(
            LoweringActualRow(
                action_digest=action_digest,
                target_kind=facts.target_kind,
                optimization_level=facts.optimization_level,
                record=msgspec.json.encode(lowering),
                create_time_ns=now,
            )
        )
    session.merge(
        BuildActualRow(
            bundle_digest=bundle_digest,
            target_kind=facts.target_kind,
            optimization_level=facts.optimization_level,
            record=msgspec.json.encode(facts.build),
            create_time_ns=now,
        )
    )


def find_planned(session: Session, plan_digests: Sequence[str]) -> dict[str, CachedExecutable]:
    """Finds the executables that plans led to, if the cache still lists them, by plan digest."""
    query = (
        select(PlannedExecutableRow.plan_digest, CachedExecutableRow.record)
        .join(CachedExecutableRow, CachedExecutableRow.action_digest == PlannedExecutableRow.action_digest)
        .where(PlannedExecutableRow.plan_digest.in_(plan_digests))
    )
    found = session.execute(query).all()
    return {digest: msgspec.json.decode(record, type=CachedExecutable) for digest, record in found}


def list_lowerings(session: Session, target_kind: str, optimization_level: int) -> list[LoweringActual]:
    """Lists the newest recorded lowerings for a target and level."""
    query = select(LoweringActualRow.record).where(
        LoweringActualRow.target_kind == target_kind, LoweringActualRow.optimization_level == optimization_level
    )
    newest = query.order_by(LoweringActualRow.create_time_ns.desc()).limit(_MAX_READ)
    return [msgspec.json.decode(record, type=LoweringActual) for record in session.scalars(newest)]


def list_builds(session: Session, target_kind: str, optimization_level: int) -> list[BuildActual]:
    """Lists the newest recorded builds for a target and level."""
    query = select(BuildActualRow.record).where(
        BuildActualRow.target_kind == target_kind, BuildActualRow.optimization_level == optimization_level
    )
    newest = query.order_by(BuildActualRow.create_time_ns.desc()).limit(_MAX_READ)
    return [msgspec.json.decode(record, type=BuildActual) for record in session.scalars(newest)]
