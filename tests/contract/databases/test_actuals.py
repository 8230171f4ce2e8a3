import msgspec

from compiler_svc.database import actuals, cache
from compiler_svc.database.actuals import BuildActual, BuildFacts, LoweringActual
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.database.engine import Database
from tests.contract.databases.conftest import run

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


def remember(database: Database, digest: str = "action-1", executable: CachedExecutable = EXECUTABLE) -> None:
    run(database, cache.remember_executables, {digest: executable})
    facts = msgspec.structs.replace(FACTS, action_digests=FACTS.action_digests | {"plan-1": digest})
    run(database, actuals.remember_facts, "bundle-1", facts)


def find(database: Database) -> dict[str, CachedExecutable]:
    return run(database, actuals.find_planned, ["plan-1", "plan-2", "plan-3"])


def test_a_plan_leads_to_the_executables_that_the_cache_lists(database: Database) -> None:
    remember(database)
    assert find(database) == {"plan-1": EXECUTABLE}


def test_records_are_of_one_target_and_level(database: Database) -> None:
    for _ in range(2):
        remember(database)
    for kind, level, count in (("cpu", 1, 1), ("cpu", 0, 0), ("trn1", 1, 0)):
        assert run(database, actuals.list_lowerings, kind, level) == [LOWERING] * count
        assert run(database, actuals.list_builds, kind, level) == [BUILD] * count


def test_a_newer_result_of_the_same_plan_replaces_the_older(database: Database) -> None:
    other = msgspec.structs.replace(EXECUTABLE, blob="sha256:c")
    remember(database)
    remember(database, "action-3", other)
    assert find(database) == {"plan-1": other}


def test_what_the_store_lost_is_forgotten(database: Database) -> None:
    remember(database)
    run(database, cache.forget_lost, has_blob=lambda _: False, has_bundle=lambda _: True)
    assert find(database) == {}
    run(database, cache.remember_executables, {"action-1": EXECUTABLE})
    assert find(database) == {}, "the plan went with the executable"
