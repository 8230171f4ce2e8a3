"""A runtime process that lacks descriptors or disk space: it says so by name, and serves again when there is room."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import grpc
import psutil
import pytest
from kiln.runtime.v1 import runtime_pb2 as runtime

from bundle.store.layout import Layout
from tests.hang_guard import HANG_S
from tests.ranks.toy import ToyBundle
from tests.ranks.toy_bundles import MakeToy, toy, toy_directory
from tests.ranks.toy_publishing import publish_toy
from tests.servers.answers import reason_of
from tests.servers.stack import token_request, tokens_of
from tests.shortages import limited
from tests.system.runtime_process import RuntimeProcess, run_runtime, send, wait_until

__all__ = ["toy", "toy_directory"]

#: The soft limit of many an init system, divided by four.
FEW_DESCRIPTORS: Final = 256
NUM_IDLE: Final = 400
#: As a limit, it lets a process open no descriptor at all, whatever it closes but these.
STANDARD_STREAMS: Final = 3


@pytest.fixture(scope="module")
def bundle(toy: MakeToy) -> ToyBundle:
    return toy("tokens", 0)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, bundle: ToyBundle) -> Iterator[RuntimeProcess]:
    """A runtime that serves the toy as `d`, from a directory of bundles; tests leave it as they found it."""
    directory = tmp_path_factory.mktemp("runtime")
    digest = publish_toy(Layout.create(directory / "bundles"), bundle, 0)
    with run_runtime(None, directory, f"--bundles={directory / 'bundles'}") as started:
        started.load(digest)
        yield started


def generate(process: RuntimeProcess) -> list[int]:
    request = token_request("d", [3, 9, 4], 8, temperature=0.0)
    return tokens_of(list(process.generation.Generate(request, timeout=60)))


@contextmanager
def without_descriptors(process: RuntimeProcess) -> Iterator[None]:
    """400 connections that say nothing take every descriptor that the runtime may have."""
    host, _, port = process.address.rpartition(":")
    with limited(resource.RLIMIT_NOFILE, FEW_DESCRIPTORS, process.pid), ExitStack() as connections:
        for _ in range(NUM_IDLE):
            connections.enter_context(socket.create_connection((host, int(port))))
        wait_until(lambda: psutil.Process(process.pid).num_fds() >= FEW_DESCRIPTORS)
        # What the runtime closes from now on, such as these connections themselves, which it gives 20 s, makes no room.
        with limited(resource.RLIMIT_NOFILE, STANDARD_STREAMS, process.pid):
            yield


def test_a_rank_that_dies_without_descriptors_is_replaced_when_there_are_some(process: RuntimeProcess) -> None:
    before, (rank,) = generate(process), process.ranks()
    with without_descriptors(process):
        send(rank)
        wait_until(lambda: "short of descriptors" in process.get().message)
        assert process.get().state == runtime.Deployment.STATE_RECOVERING
    process.wait_for("READY")
    assert process.get().message == ""
    assert generate(process) == before
    # Another client can connect.
    with grpc.insecure_channel(process.address) as channel:
        grpc.channel_ready_future(channel).result(HANG_S)


@pytest.mark.slow
def test_a_load_without_descriptors_is_refused_by_name_and_succeeds_when_there_are_some(
    process: RuntimeProcess,
) -> None:
    before, digest = generate(process), process.get().roles[0].bundle_digest
    process.unload()
    with without_descriptors(process):
        with pytest.raises(grpc.RpcError) as caught:
            process.load(digest)
        assert (caught.value.code(), reason_of(caught.value)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "RESOURCES_SHORT",
        )
    process.load(digest)
    assert generate(process) == before
