"""SIGKILL of a compiler while a lowering for Neuron runs, by doubles: no process stays, and the compile goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.layout import Layout
from bundle.reader import open_bundle
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.hang_guard import HANG_S
from tests.leftovers import Moment, find_leaks, find_left
from tests.neuron.host import nrt_library
from tests.neuron.neuronx_cc import find_waiting, write_waiting_program
from tests.neuron.stand_in import make_environment
from tests.neuron.standin import make_interpreter
from tests.processes import lives
from tests.servers.compiler_process import CompilerProcess, run_compiler
from tests.servers.running_compiler import response_of
from tests.servers.stores import check_store, list_needed_blobs

__all__ = ["nrt_library"]

pytestmark = pytest.mark.timeout(600)

CONFIG = {
    "seq_len": 32,
    "is_continuous_batching": True,
    "enable_bucketing": True,
    "context_encoding_buckets": [8],
    "token_generation_buckets": [32],
}
TAGS = ("context_encoding_8", "token_generation_32")
#: Numbers of a row of logits, which the double's NEFFs return.
VOCABULARY = 96
#: The file that tells the double of neuronx-cc what to do. Every process of the compiler has the variable.
VARIABLE = "NEURON_TEST_NEURONX_CC"


@dataclass
class Site:
    """A compiler's directories, and the double of neuronx-cc."""

    home: Path
    interpreter: Path
    orders: Path

    @property
    def waiting(self) -> Path:
        return self.home / "waiting"

    def wait_for_ever(self, *, leads_session: bool) -> None:
        """Lets neuronx-cc run until it is killed."""
        program = write_waiting_program(self.waiting, leads_session=leads_session)
        self.orders.write_text(json.dumps({"program": program}))

    def answer(self) -> None:
        """Lets neuronx-cc make NEFFs that the stand-in for libnrt loads."""
        self.orders.write_text(json.dumps({"answers": dict.fromkeys(TAGS, [0.0] * VOCABULARY)}))

    def find_processes(self) -> list[psutil.Process]:
        """The processes of the site's compilers that have not ended, whatever their parents are."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(VARIABLE) == str(self.orders) and lives(process):
                    found.append(process)
        return found


@pytest.fixture
def site(home: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    (home / "temporary").mkdir()
    (home / "neuron").mkdir()
    site = Site(home, make_interpreter(home / "neuron"), home / "orders.json")
    monkeypatch.setenv("TMPDIR", str(home / "temporary"))
    monkeypatch.setenv(VARIABLE, str(site.orders))
    return site


#: Waits for the moment at which the compiler is to die.
Reach = Callable[[CompilerProcess, Site], bool]


def runs_everywhere(_: CompilerProcess, site: Site) -> bool:
    """Whether neuronx-cc runs for both executables."""
    return len(find_waiting(site.waiting)) == len(TAGS)


def traces(compiler: CompilerProcess, _: Site) -> bool:
    """Whether an interpreter has begun."""
    return any(process.name() not in ("kiln-lowering", "") for process in compiler.lowerings())


async def die(site: Site, reach: Reach) -> str:
    """Kills a compiler when it has reached a point of a compile; returns the name of the operation."""
    async with run_compiler(site.home, "--neuron-python", str(site.interpreter), "--lowerings", "2") as compiler:
        operation = await compile_tiny(compiler)
        async with asyncio.timeout(2 * HANG_S):
            while not reach(compiler, site):
                done = await compiler.client.get(operation.name)
                assert not done.done, done
                await asyncio.sleep(0.02)
        names = {process.name() for process in site.find_processes()}
        assert {"kiln-lowering", "kiln-lowerings", "kiln-build", "kiln-builds"} <= names
        os.kill(compiler.process.pid, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            while site.find_processes():  # noqa: ASYNC110 - processes that are not ours announce no end
                await asyncio.sleep(0.02)
    check_store(site.home)
    return operation.name


async def compile_tiny(compiler: CompilerProcess) -> operations_pb2.Operation:
    return await compiler.client.compile(
        config_json=json.dumps({"neuron_config": CONFIG}),
        target=pb.Target(kind=pb.Target.KIND_TRN2),
        request_id="r",
    )


async def resume(site: Site, name: str) -> str:
    """Lets another compiler finish the operation; returns the digest of its bundle."""
    site.answer()
    async with run_compiler(site.home, "--neuron-python", str(site.interpreter)) as compiler:
        operation = await compile_tiny(compiler)
        assert operation.name == name
        digest = response_of(await compiler.client.finish(operation)).digest
        await compiler.client.bundles.CollectGarbage(bundle_pb2.CollectGarbageRequest())
    return digest


def check_leftovers(site: Site, digest: str) -> None:
    """Checks that the store has the bundle and nothing else, and that no half of a file lies elsewhere."""
    assert check_store(site.home) == {digest}
    places = {
        "store": site.home / "store",
        "compiler cache": site.home / "cache",
        "temporary": site.home / "temporary",
    }
    assert find_leaks(places) == []
    assert find_left(places, Moment.STARTED, kept=list_needed_blobs(site.home)) == []


async def check_bundle(site: Site, digest: str, nrt_library: Path) -> None:
    """Loads the bundle on a core, of a host that the compiler does not see."""
    bundle = open_bundle(Layout(site.home / "store"), digest)
    assert sorted(one.tag for one in bundle.manifest.executables) == sorted(TAGS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in make_environment(nrt_library, site.home / "host").items():
            patch.setenv(name, value)
        with RankForkservers() as forkservers:
            group = await RankGroup.start(
                bundle.manifest, bundle.blob_path, num_threads=1, open_forkserver=forkservers.open, cores=(0,)
            )
            try:
                await group.load()
                await group.warm_up()
            finally:
                await group.close()


@pytest.mark.slow
@pytest.mark.parametrize("reach", [runs_everywhere, traces])
@pytest.mark.parametrize("leads_session", [False, True], ids=["its session", "own session"])
async def test_compile_goes_on_after_a_death(
    site: Site, nrt_library: Path, *, reach: Reach, leads_session: bool
) -> None:
    site.wait_for_ever(leads_session=leads_session)
    name = await die(site, reach)
    digest = await resume(site, name)
    check_leftovers(site, digest)
    await check_bundle(site, digest, nrt_library)
