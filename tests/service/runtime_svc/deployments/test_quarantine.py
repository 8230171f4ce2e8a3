"""Which loads are quarantined after which deaths of the process, and how that is lifted."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from bundle.errors import ManifestInvalid, ResourcesShort
from execution.errors import RankDied
from runtime_svc.deployments.deployment_spec import DeploymentSpec
from runtime_svc.deployments.quarantine import LoadQuarantine
from runtime_svc.deployments.records import FILE_NAME, LoadRecord, RecordStore
from runtime_svc.errors import DeploymentNotReady, LoadInProgress, LoadQuarantined, WeightsQuarantined
from tests.hang_guard import until

SPECS = {name: DeploymentSpec(name, f"{name}:v1") for name in "abc"}
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
        await until(lambda: self.under_way >= set(expected))
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


async def die_loading(directory: Path, *lives: str) -> None:
    """Processes that die one after another while they do these loads."""
    for names in lives:
        async with process(directory) as one:
            await one.begin(names)


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
    await die_loading(tmp_path, "abc")
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


async def test_one_of_several_is_a_suspect_at_most(tmp_path: Path) -> None:
    records = RecordStore(tmp_path)
    for name in "ab":  # the record of one that has ended may be late, so two suspects are under way
        await records.loads.save(LoadRecord(spec=SPECS[name], deaths=1, is_under_way=True))
    records.close()
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == set()
        assert {load.deaths for load in await one.noted()} == {1}


async def test_a_suspect_and_others_take_turns(tmp_path: Path) -> None:
    await die_loading(tmp_path, "ab")
    async with process(tmp_path) as one:
        await one.begin("ca", "c")  # the suspect waits for the other
        await one.begin("b", "c")
        one.loads[0].cancel()
        await one.settle("ca")
        await one.begin("c", "ca")
        assert [record.is_under_way for record in await one.noted()] == [True, False]


@pytest.mark.parametrize("error", [None, ManifestInvalid("broken")])
async def test_a_load_that_has_ended_is_no_suspect(tmp_path: Path, error: Exception | None) -> None:
    await die_loading(tmp_path, "a")
    async with process(tmp_path) as one:
        await asyncio.gather(one.load("a", error), return_exceptions=True)
        assert await one.noted() == ()


@pytest.mark.parametrize("error", [ResourcesShort("memory", "none", 1.0), RankDied(0, -9)])
async def test_what_is_repeated_proves_nothing(tmp_path: Path, error: Exception) -> None:
    await die_loading(tmp_path, "a")
    async with process(tmp_path) as one:
        with pytest.raises(type(error)):
            await one.load("a", error)
        await one.begin("a")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"a"}


async def test_a_declaration_that_has_changed_is_another_load(tmp_path: Path) -> None:
    await die_loading(tmp_path, "a", "a")
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
    await die_loading(tmp_path, *"aaww")
    async with process(tmp_path) as one:
        assert quarantined(one.quarantine) == {"a", "w"}
        await asyncio.gather(one.quarantine.lift("a"), one.quarantine.lift("a"))
        assert (quarantined(one.quarantine), await one.noted()) == (set(), ())


@pytest.mark.parametrize("error", [DeploymentNotReady("a", "RECOVERING"), LoadInProgress("a")])
async def test_weights_that_wait_for_their_deployment_stay_suspects(tmp_path: Path, error: Exception) -> None:
    await die_loading(tmp_path, "w")
    async with process(tmp_path) as one:
        with pytest.raises(type(error)):
            async with one.quarantine.recording(*LOADS["w"]):
                raise error
        assert [record.deaths for record in await one.noted()] == [1]


async def test_an_end_that_cannot_be_written_at_once_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bundle.host.shortage._FIRST_DELAY_S", 0.01)
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
