"""Which loads are quarantined after which deaths of the process, and how that is lifted."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as pb

from bundle.errors import ManifestInvalid, ResourcesShort
from runtime_svc.deployments.deployment_spec import DeploymentSpec
from runtime_svc.deployments.quarantine import LoadQuarantine
from runtime_svc.deployments.records import FILE_NAME, LoadRecord, RecordStore
from runtime_svc.errors import DeploymentNotReady, LoadInProgress
from runtime_svc.metrics import list_metrics
from runtime_svc.quarantine_errors import LoadQuarantined, WeightsQuarantined
from tests.bundles.published import LayoutBundleService, publish
from tests.hang_guard import HANG_S
from tests.servers.runtime import Runtime, raises, serve_runtime

SPECS = {name: DeploymentSpec(name, f"{name}:v1") for name in "abc"}
PROD, FOLLOWING = "story@prod", "--follow-interval=0.03"
#: The loads of these deployments, and one of weights for `a`.
WEIGHTS: Final = "sha256:" + "1" * 64
LOADS = {name: (spec, "") for name, spec in SPECS.items()} | {"w": (SPECS["a"], WEIGHTS)}


class Process:
    """The quarantine of one process."""

    def __init__(self, directory: Path) -> None:
        self.records = RecordStore(directory)
        self.quarantine = LoadQuarantine(self.records)
        self.under_way: set[str] = set()
        self.loads: list[asyncio.Task[None]] = []

    async def begin(self, names: str, expected: str | None = None) -> None:
        """Begins loads that do not end, and checks that the expected ones are under way then: all if it is None."""
        self.loads += [asyncio.create_task(self._load(name)) for name in names]
        await self.settle(names if expected is None else expected)

    async def settle(self, expected: str) -> None:
        """Waits until the expected loads are under way, and a while longer for others, which must not be."""
        async with asyncio.timeout(HANG_S):
            while not self.under_way >= set(expected):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert self.under_way == set(expected)

    async def load(self, name: str, error: Exception | None = None) -> None:
        """Does a whole load, which may fail."""
        async with self.quarantine.recording(SPECS[name]):
            if error is not None:
                raise error

    async def noted(self) -> tuple[LoadRecord, ...]:
        """The records, once those of ended loads are gone."""
        await asyncio.gather(*self.quarantine._writes)
        return self.records.loads.list()

    async def _load(self, name: str) -> None:
        async with self.quarantine.recording(*LOADS[name]):
            self.under_way.add(name)
            await asyncio.Event().wait()


@asynccontextmanager
async def process(directory: Path, specs: Collection[DeploymentSpec] = tuple(SPECS.values())) -> AsyncIterator[Process]:
    """A process that dies at the end of the block: it leaves what its records say then."""
    one = Process(directory)
    await one.quarantine.open(specs)
    yield one
    left = (directory / FILE_NAME).read_bytes()
    await one.quarantine.close()
    for load in one.loads:
        load.cancel()
    await asyncio.gather(*one.loads, return_exceptions=True)
    one.records.close()
    (directory / FILE_NAME).write_bytes(left)


def quarantined(quarantine: LoadQuarantine) -> set[str]:
    found = set()
    for name, load in LOADS.items():
        try:
            quarantine.check(*load)
        except (LoadQuarantined, WeightsQuarantined):
            found.add(name)
    return found


async def test_a_load_that_is_alone_twice_when_the_process_dies(tmp_path: Path) -> None:
    for _ in range(2):
        async with process(tmp_path) as one:
            assert quarantined(one.quarantine) == set()
            await one.begin("a")
    for _ in range(2):
        async with process(tmp_path) as one:
            assert quarantined(one.quarantine) == {"a"}
            with pytest.raises(
                LoadQuarantined, match=r"died 2 times .*`kiln load a:v1 --deployment a`.*`kiln unload a`"
            ):
                one.quarantine.check(SPECS["a"])
    async with process(tmp_path) as one:
        await one.quarantine.lift("a")
        assert quarantined(one.quarantine) == set()
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == set()


async def test_the_innocent_are_not_quarantined_with_the_guilty(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.begin("abc")
    async with process(tmp_path) as one:
        await one.begin("abc", "a")  # suspects load one after another
        one.loads[0].cancel()
        await one.settle("ab")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"b"}
        await one.load("a")
        await one.begin("c")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"b", "c"}
        await one.begin("a")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"b", "c"}, "its load had ended, so this was the first death of `a`"


async def test_a_suspect_and_others_take_turns(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.begin("ab")
    async with process(tmp_path) as one:
        await one.begin("ca", "c")  # the suspect waits for the other
        await one.begin("b", "c")
        one.loads[0].cancel()
        await one.settle("ca")
        await one.begin("c", "ca")
        assert [record.is_under_way for record in await one.noted()] == [True, False]


@pytest.mark.parametrize("error", [None, ManifestInvalid("broken")])
async def test_a_load_that_has_ended_is_no_suspect(tmp_path: Path, error: Exception | None) -> None:
    async with process(tmp_path) as one:
        await one.begin("a")
    async with process(tmp_path) as one:
        await asyncio.gather(one.load("a", error), return_exceptions=True)
        assert await one.noted() == ()


async def test_what_is_repeated_proves_nothing(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.begin("a")
    async with process(tmp_path) as one:
        with pytest.raises(ResourcesShort):
            await one.load("a", ResourcesShort("memory", "none", 1.0))
        await one.begin("a")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"a"}


async def test_a_declaration_that_has_changed_is_another_load(tmp_path: Path) -> None:
    for _ in range(2):
        async with process(tmp_path) as one:
            await one.begin("a")
    changed = DeploymentSpec("a", "a:v2")
    async with process(tmp_path, [changed]) as one:
        one.quarantine.check(changed)
        assert await one.noted() == ()


async def test_weights_are_quarantined_apart_from_their_deployment(tmp_path: Path) -> None:
    for _ in range(2):
        async with process(tmp_path) as one:
            await one.load("a")
            await one.begin("w")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"w"}
        with pytest.raises(WeightsQuarantined, match=r"died 2 times .*`kiln load a:v1 --deployment a --follow-alias`"):
            one.quarantine.check(*LOADS["w"])
        await one.load("a")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"w"}, "the deployment's own load ended well, and says nothing of weights"
        await one.begin("a")
        await one.quarantine.lift("a")
        assert quarantined(one.quarantine) == set()
        assert [record.is_under_way for record in await one.noted()] == [True], "a load that runs stays recorded"


async def test_two_who_lift_a_quarantine_at_once(tmp_path: Path) -> None:
    for name in "aaww":
        async with process(tmp_path) as one:
            await one.begin(name)
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"a", "w"}
        await asyncio.gather(one.quarantine.lift("a"), one.quarantine.lift("a"))
        assert (quarantined(one.quarantine), await one.noted()) == (set(), ())


@pytest.mark.parametrize("error", [DeploymentNotReady("a", "RECOVERING"), LoadInProgress("a")])
async def test_weights_that_wait_for_their_deployment_stay_suspects(tmp_path: Path, error: Exception) -> None:
    async with process(tmp_path) as one:
        await one.begin("w")
    async with process(tmp_path) as one:
        with pytest.raises(type(error)):
            async with one.quarantine.recording(*LOADS["w"]):
                raise error
        assert [record.deaths for record in await one.noted()] == [1]


async def test_an_end_that_cannot_be_written_at_once_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bundle.shortage._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("runtime_svc.deployments.records.WRITE_DELAYS_S", ())
    async with process(tmp_path) as one:
        forget, lacks = one.records.loads.forget, 3

        async def fail(deployment_id: str) -> None:
            nonlocal lacks
            lacks -= 1
            if lacks > 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            await forget(deployment_id)

        monkeypatch.setattr(one.records.loads, "forget", fail)
        await one.load("a")
        assert await one.noted() == ()


def publish_as(bundles: LayoutBundleService, name: str) -> None:
    bundles.names[name] = publish(bundles.layout)


async def take_down(directory: Path, *ids: str) -> None:
    """Makes the deployments of the state directory ones that took a process down."""
    records = RecordStore(directory / "cache")
    for record in records.deployments.list():
        if record.spec.deployment_id in ids:
            await records.loads.save(LoadRecord(spec=record.spec, deaths=1, is_under_way=True))
    records.close()


async def follow_message(served: Runtime, wanted: str) -> None:
    """Waits until the follow message of `a` has a text or, with an empty one, until there is none."""
    async with asyncio.timeout(HANG_S):
        while wanted not in (said := (await served.get("a")).follow_message) or bool(said) != bool(wanted):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def read_metric(served: Runtime, name: str) -> float:
    (row,) = (row for row in list_metrics(served.server.deployments) if row.name == name)
    ((_, value),) = row.read()
    assert isinstance(value, float)
    return value


async def health_of(served: Any, name: str) -> str:
    response = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(service=name))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def test_a_quarantined_deployment_is_there_and_not_loaded(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        digest = (await first.deploy("a")).roles[0].bundle_digest
        await first.deploy("b")
    await take_down(tmp_path, "a")
    for is_last in (False, True):
        async with serve_runtime(tmp_path) as second:
            await second.wait_for_state("READY", "b")
            failed = await second.get("a")
            assert failed.state == pb.Deployment.STATE_FAILED
            assert "deployment 'a' is quarantined: the runtime died 2 times" in failed.message
            assert len(second.groups) == 1
            assert [await health_of(second, name) for name in ("", "deployment/a", "deployment/b")] == [
                "NOT_SERVING",
                "NOT_SERVING",
                "SERVING",
            ]
            async with raises("FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY"):
                await second.generate([5], deployment_id="a")
            if is_last:
                assert (await second.load(digest, "a"))[-1].deployment.state == pb.Deployment.STATE_READY
                assert await health_of(second, "") == "SERVING"
    async with serve_runtime(tmp_path) as third:
        await third.wait_for_state("READY", "a")


async def test_a_quarantined_deployment_can_be_unloaded(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy("a")
    await take_down(tmp_path, "a")
    async with serve_runtime(tmp_path) as second:
        await second.wait_for_state("FAILED", "a")
        await second.unload("a")
    async with serve_runtime(tmp_path) as third:
        assert third.server.deployments.list() == []
        await third.deploy("a")


async def wait_until_forgotten(served: Runtime) -> None:
    """Waits until no load is recorded. Clients may see the end of a load before its record goes."""
    async with asyncio.timeout(HANG_S):
        while served.server.deployments._records.loads.list():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_shutdown_during_a_load_is_no_death(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as first:
        await first.deploy("a")
    for _ in range(3):
        async with serve_runtime(tmp_path) as again:
            again.load_gate.clear()
            async with asyncio.timeout(HANG_S):
                while not any(one.is_under_way for one in again.server.deployments._records.loads.list()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await again.get("a")).state == pb.Deployment.STATE_LOADING
    async with serve_runtime(tmp_path) as last:
        await last.wait_for_state("READY", "a")
        await wait_until_forgotten(last)


async def test_a_declared_deployment_is_tried_again_when_the_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deployments.yml"
    file.write_text("[{id: a, ref: story}]")

    def publish_story(bundles: LayoutBundleService) -> None:
        publish_as(bundles, "story")

    async with serve_runtime(tmp_path, f"--deployments={file}", prepare=publish_story) as first:
        await first.wait_for_state("READY", "a")
    await take_down(tmp_path, "a")
    async with serve_runtime(tmp_path, f"--deployments={file}", prepare=publish_story) as second:
        assert "quarantined" in (await second.wait_for_state("FAILED", "a")).message
        await second.server._reconciler.reload()
        await second.wait_for_state("READY", "a")


async def test_quarantined_weights_are_not_loaded_until_someone_asks_or_the_alias_moves(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FOLLOWING) as first:
        first.publish(PROD)
        deployment = (await first.load(PROD, "a", follow_alias=True))[-1].deployment
        story, poison = deployment.roles[0].bundle_digest, first.publish("poison", bias=31)
        mended = first.publish("mended", bias=9)
        (record,) = first.server.deployments._records.deployments.list()
    names = {PROD: poison}
    records = RecordStore(tmp_path / "cache")
    await records.loads.save(LoadRecord(spec=record.spec, deaths=1, is_under_way=True, weights_digest=poison))
    records.close()
    serving = story
    for is_asked in (False, True):
        async with serve_runtime(tmp_path, FOLLOWING, prepare=lambda bundles: bundles.names.update(names)) as second:
            await second.wait_for_state("READY", "a")
            await follow_message(second, f"{poison} does not serve: they are quarantined: the runtime died 2 times")
            assert (await second.get("a")).roles[0].weights_digest == serving
            assert [read_metric(second, f"kiln:{what}_quarantined") for what in ("weights", "deployment")] == [1, 0]
            if is_asked:
                await second.load(PROD, "a", follow_alias=True)
            else:
                second.bundles.names[PROD] = mended
            await follow_message(second, "")
            serving = poison if is_asked else mended
            assert (await second.get("a")).roles[0].weights_digest == serving
            assert read_metric(second, "kiln:weights_quarantined") == 0


async def test_weights_of_an_alias_are_recorded_while_they_load(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path, FOLLOWING) as served:
        served.publish(PROD)
        await served.load(PROD, follow_alias=True)
        # Weights are swapped between requests, so this one holds their load up.
        served.ranks.gate.clear()
        stream = asyncio.create_task(served.generate([5]))
        await served.wait_for_slots(1)
        digest = served.publish(PROD, bias=31)
        loads = served.server.deployments._records.loads
        async with asyncio.timeout(HANG_S):
            while not loads.list():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert [(one.weights_digest, one.deaths, one.is_under_way) for one in loads.list()] == [(digest, 0, True)]
        served.ranks.gate.set()
        await stream
        async with asyncio.timeout(HANG_S):
            while (await served.get()).roles[0].weight_epoch != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await wait_until_forgotten(served)


async def test_a_declared_deployment_gets_quarantined_weights_when_the_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deployments.yml"
    file.write_text(f"[{{id: a, ref: {PROD}, follow_alias: true}}]")
    options = (f"--deployments={file}", FOLLOWING)
    async with serve_runtime(tmp_path, *options, prepare=lambda bundles: publish_as(bundles, PROD)) as first:
        await first.wait_for_state("READY", "a")
        poison = first.publish("poison", bias=31)
        (record,) = first.server.deployments._records.deployments.list()
    records = RecordStore(tmp_path / "cache")
    await records.loads.save(LoadRecord(spec=record.spec, deaths=1, is_under_way=True, weights_digest=poison))
    records.close()
    names = {PROD: poison}
    async with serve_runtime(tmp_path, *options, prepare=lambda bundles: bundles.names.update(names)) as second:
        await second.wait_for_state("READY", "a")
        await follow_message(second, "quarantined")
        await second.server._reconciler.reload()
        await follow_message(second, "")
        assert (await second.get("a")).roles[0].weights_digest == poison
