from sqlalchemy.orm import Session

from compiler_svc.database import actuals, cache
from compiler_svc.database.actuals import BuildActual, BuildFacts, LoweringActual
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.database.engine import Database

EXECUTABLE = CachedExecutable(
    blob="sha256:b", size_bytes=7, format="aoti", state_convention="in_place", constants=("w",)
)
LOWERING = LoweringActual(submodel="token_generation", num_layers=4, duration_s=9.5, peak_memory_bytes=1 << 30)
BUILD = BuildActual(num_layers=4, num_executables=2, weights_bytes=1000, trace_s=1.5, rest_s=2.5)
FACTS = BuildFacts(
    target_kind="cpu",
    optimization_level=1,
    action_digests={"plan-1": "action-1", "plan-2": "action-2"},
    lowerings={"action-1": LOWERING},
    build=BUILD,
)


def remember(session: Session) -> None:
    cache.remember_executables(session, {"action-1": EXECUTABLE})
    actuals.remember_facts(session, "bundle-1", FACTS)


def find(session: Session) -> dict[str, CachedExecutable]:
    return actuals.find_planned(session, ["plan-1", "plan-2", "plan-3"])


def test_a_plan_leads_to_the_executables_that_the_cache_lists(database: Database) -> None:
    database.run_and_wait(remember)
    assert database.run_and_wait(find) == {"plan-1": EXECUTABLE}


def test_records_are_of_one_target_and_level(database: Database) -> None:
    database.run_and_wait(remember)
    database.run_and_wait(remember)
    assert database.run_and_wait(lambda session: actuals.list_lowerings(session, "cpu", 1)) == [LOWERING]
    assert database.run_and_wait(lambda session: actuals.list_builds(session, "cpu", 1)) == [BUILD]
    for kind, level in (("cpu", 0), ("trn1", 1)):
        assert database.run_and_wait(lambda session, k=kind, o=level: actuals.list_lowerings(session, k, o)) == []
        assert database.run_and_wait(lambda session, k=kind, o=level: actuals.list_builds(session, k, o)) == []


def test_a_newer_result_of_the_same_plan_replaces_the_older(database: Database) -> None:
    database.run_and_wait(remember)
    other = CachedExecutable(
        **{**{f: getattr(EXECUTABLE, f) for f in EXECUTABLE.__struct_fields__}, "blob": "sha256:c"}
    )

    def remember_another(session: Session) -> None:
        cache.remember_executables(session, {"action-3": other})
        facts = BuildFacts(
            target_kind="cpu", optimization_level=1, action_digests={"plan-1": "action-3"}, lowerings={}, build=BUILD
        )
        actuals.remember_facts(session, "bundle-1", facts)

    database.run_and_wait(remember_another)
    assert database.run_and_wait(find) == {"plan-1": other}


def test_what_the_store_lost_is_forgotten(database: Database) -> None:
    database.run_and_wait(remember)
    database.run_and_wait(
        lambda session: cache.forget_lost(session, has_blob=lambda _: False, has_bundle=lambda _: True)
    )
    assert database.run_and_wait(find) == {}
    database.run_and_wait(lambda session: cache.remember_executables(session, {"action-1": EXECUTABLE}))
    assert database.run_and_wait(find) == {}, "the plan went with the executable"
