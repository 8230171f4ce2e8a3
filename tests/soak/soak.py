"""The run itself: learn the references, count, let clients, operators and faults loose, quiesce, count again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from kiln.runtime.v1 import generation_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as pb

from tests.repository import ROOT
from tests.soak.census import Census, settle, take_census
from tests.soak.clients import Client, clean_captures, keep_calling
from tests.soak.faults import choose_faults, inflict
from tests.soak.memory import MemorySampler, Slope
from tests.soak.operations import OPERATIONS, perform, unload_at_last
from tests.soak.references import LAST_PROMPT, MAX_ANSWER, greedy_request
from tests.soak.services import Services
from tests.soak.site import END_TIMEOUT_S, LASTING, READY_TIMEOUT_S, Site, SiteLost
from tests.soak.streams import Stream

NUM_CLIENTS: Final = 64
#: Clients share connections, as those behind a proxy.
NUM_CHANNELS: Final = 8
#: Seconds without faults before the first count, in which pools of threads and descriptors fill.
WARM_UP_S: Final = 8.0
#: Longest pauses between two faults, and between two operations.
FAULT_PAUSE_S: Final = 5.0
OPERATION_PAUSE_S: Final = 1.5
MAX_STALL_S: Final = 1.0
#: Groups of processes whose memory has to be flat. Ranks come and go.
FLAT: Final = ("runtime", "compiler")
#: Clients give way to what they measure.
CLIENT_NICENESS: Final = 5

Progress = Callable[[Site, MemorySampler, float], None]


@dataclass(frozen=True)
class Report:
    """What a run found.

    Attributes:
        minutes: How long clients and faults were let loose.
        stalls: What the witness wrote; empty if it wrote nothing.
        slopes: Of memory, by group of processes with enough samples.
        left_out: By name of a fault or operation, why it was left out.
        findings: What must not be. An empty list is a run that passed.
    """

    seed: int
    minutes: float
    site: Site
    stalls: Mapping[str, Any]
    slopes: Mapping[str, Slope]
    left_out: Mapping[str, str]
    findings: list[str]


async def soak(services: Services, *, minutes: float, seed: int, show: Progress) -> Report:
    """Runs a soak on services that no other client uses.

    Args:
        minutes: How long clients and faults are let loose; the rest takes about a minute.
        seed: Of every choice. The order in which the machine carries them out differs from run to run.
        show: Called every second.
    """
    site, sampler = Site(services), MemorySampler(services.memory_groups)
    faults, left_out = choose_faults(services)
    stalls: dict[str, Any] = {}

    def count() -> Census:
        return take_census(services.groups(), [services.disk, services.scratch])

    try:
        await site.learn()
        await warm_up(site, seed)
        before = count()
        site.begun_s = time.monotonic()
        witness = start_witness(services)
        os.nice(CLIENT_NICENESS)
        try:
            async with asyncio.TaskGroup() as tasks:
                over, all_done = asyncio.Event(), asyncio.Event()
                sampling = tasks.create_task(sampler.run())
                clients = tasks.create_task(run_clients(site, random.Random(f"{seed} clients"), all_done))
                lanes = [
                    tasks.create_task(
                        run_lane(rows, partial(act, site), pause_s, random.Random(f"{seed} {name}"), over)
                    )
                    for name, rows, act, pause_s in (
                        ("faults", faults, inflict, FAULT_PAUSE_S),
                        ("operations", OPERATIONS, perform, OPERATION_PAUSE_S),
                    )
                ]
                while not over.is_set():
                    await asyncio.sleep(1.0)
                    show(site, sampler, minutes)
                    if time.monotonic() - site.begun_s > minutes * 60:
                        over.set()
                # The last fault may stop a rank, which is noticed at the next step: clients call until it is over.
                await asyncio.gather(*lanes)
                all_done.set()
                await clients
                sampling.cancel()
        finally:
            stalls = await asyncio.to_thread(stop_witness, witness, site)
        await quiesce(site)
        for leak in await settle(count, before):
            site.find(f"left over: {leak}")
    except* SiteLost:
        site.find("the run ended early")
    finally:
        await site.channel.close()
    site.decide()
    slopes = sampler.fit_slopes()
    findings = [*site.findings, *find_in_log(services), *find_stalls(stalls), *find_growth(slopes)]
    return Report(seed, minutes, site, stalls, slopes, left_out, findings)


async def warm_up(site: Site, seed: int) -> None:
    """Lets clients loose for some seconds without faults; what they meet then is held to the same rules."""
    over = asyncio.Event()
    clients = asyncio.create_task(run_clients(site, random.Random(f"{seed} warm-up"), over))
    await asyncio.sleep(WARM_UP_S)
    over.set()
    await clients
    site.ends.clear()
    site.num_streams = site.num_compared = 0
    for deployment_id in LASTING:
        await wait_until_idle(site, deployment_id)
    clean_captures(site.services.capture)
    # The runtime lets go of what was taken.
    await asyncio.sleep(2.0)


async def run_clients(site: Site, choose: random.Random, over: asyncio.Event) -> None:
    """Keeps all clients calling until the run is over."""
    address = site.services.runtime.address
    # Without pools of their own, channels to one address share one connection.
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(NUM_CHANNELS)
    ]
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                own = random.Random(choose.getrandbits(64))
                tasks.create_task(keep_calling(Client(number, site, own, stubs[number % NUM_CHANNELS]), over))
    finally:
        for channel in channels:
            await channel.close()


async def run_lane(
    rows: Sequence[Any], act: Callable[..., Awaitable[None]], pause_s: float, choose: random.Random, over: asyncio.Event
) -> None:
    """Does one row after the other, as the random numbers choose, until the run is over; pauses before each.

    Every row comes as often as its weight says before any comes more often, so that a short run has them all.
    """
    bag: list[Any] = []
    while not over.is_set():
        await asyncio.sleep(choose.random() * pause_s)
        if not bag:
            bag = [row for row in rows for _ in range(row.weight)]
            choose.shuffle(bag)
        await act(bag.pop(), choose)


async def quiesce(site: Site) -> None:
    """Ends what is left, and checks that the runtime holds no request and serves as in the beginning."""
    for deployment_id in site.passing:
        await unload_at_last(site, deployment_id)
    await site.wait_ready("the run")
    clean_captures(site.services.capture)
    for deployment_id in LASTING:
        load = await wait_until_idle(site, deployment_id)
        held = {field.name: value for field, value in load.ListFields() if field.name.startswith(("used", "queued"))}
        if held:
            site.find(f"{deployment_id} still holds {held}")
        request = pb.ResetKVCacheRequest(deployment_id=deployment_id)
        await site.call("reset at last", site.control.ResetKVCache(request), frozenset(), is_counted=False)
        stream = Stream("read at last", deployment_id, LAST_PROMPT, MAX_ANSWER, frozenset())
        await stream.read(site.generation.Generate(greedy_request(deployment_id, LAST_PROMPT, MAX_ANSWER)))
        site.take(stream)
    listed = await site.control.ListDeployments(pb.ListDeploymentsRequest(), timeout=END_TIMEOUT_S)
    if extra := {one.id for one in listed.deployments} - set(LASTING):
        site.find(f"deployments are left: {sorted(extra)}")


async def wait_until_idle(site: Site, deployment_id: str) -> pb.Load:
    """Waits a little until no request is left, and returns how busy the deployment is then."""
    end_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        load = (await site.get(deployment_id)).load
        if not load.used_slots + load.queued_requests or time.monotonic() > end_s:
            return load
        await asyncio.sleep(0.1)


def start_witness(services: Services) -> subprocess.Popen[str]:
    """Starts the witness, at the niceness that the services have."""
    command = [sys.executable, "-m", "tests.soak.witness", services.runtime.address, str(services.front.pid)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "protos")))}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def stop_witness(witness: subprocess.Popen[str], site: Site) -> dict[str, Any]:
    """Ends the witness and returns what it saw."""
    output, _ = witness.communicate()
    if witness.returncode:
        site.find(f"the witness ended with {witness.returncode}: a health check failed")
        return {}
    seen: dict[str, Any] = json.loads(output)
    for check in seen["longest"]:
        check["time_s"] -= site.begun_s
    return seen


def find_stalls(stalls: Mapping[str, Any]) -> list[str]:
    """The stalls of the front that were too long."""
    return [
        f"{one['time_s']:.1f} s: the front stalled for {one['stall_s']:.2f} s (check: {one['latency_s']:.2f} s)"
        for one in stalls.get("longest", ())
        if one["stall_s"] > MAX_STALL_S
    ]


def find_growth(slopes: Mapping[str, Slope]) -> list[str]:
    """The groups whose memory grows."""
    return [
        f"memory of {group} grows by {slope.mb_per_hour:.1f} ± {slope.error:.1f} MB/h"
        for group in FLAT
        if (slope := slopes.get(group)) is not None and not slope.is_flat
    ]


def find_in_log(services: Services) -> list[str]:
    """The tracebacks in the runtime's log: errors that no one has named. Each event once."""
    seen: dict[str, str] = {}
    for path in sorted(Path(services.log).parent.glob(f"{services.log.name}*")):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event.get("exception"):
                    key = f"{event.get('event')}: {str(event['exception']).strip().splitlines()[-1]}"
                    seen.setdefault(key, line)
    return [f"the log has a traceback: {key}" for key in seen]
