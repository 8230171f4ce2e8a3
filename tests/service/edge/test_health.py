import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.config import EdgeConfig
from tests.servers.probe import NOT_SERVING, READ, SERVICE, SERVING, BuildServer, Probe, check_health, stub


async def test_health_is_per_service(build: BuildServer) -> None:
    server = build(Probe())
    server.set_serving(SERVICE, False)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await check_health(channel) == SERVING
        assert await check_health(channel, "google.longrunning.Operations") == SERVING
        assert await check_health(channel, SERVICE) == NOT_SERVING
        server.set_serving(SERVICE, True)
        server.set_serving("", False)
        assert await check_health(channel, SERVICE) == SERVING
        assert await check_health(channel) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check_health(channel, "absent.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(AssertionError, match=r"absent\.Service"):
        server.set_serving("absent.Service", True)


async def test_liveness_lasts_until_the_server_ends(build: BuildServer) -> None:
    probe = Probe()
    server = build(probe)
    server.set_serving("", False)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await check_health(channel, "liveness") == SERVING
        stream = aiter(stub(channel).ReadBlob(READ))
        probe.answer = probe.hang
        await anext(stream)
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0.05)
        assert await check_health(channel, "liveness") == SERVING
        assert await check_health(channel, SERVICE) == NOT_SERVING
        del stream
        await draining


async def test_names_come_and_go(build: BuildServer) -> None:
    server = build(Probe())
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="part/1")))
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        server.health.set_serving("part/1", True)
        assert (await anext(watch)).status == SERVING
        assert await check_health(channel, "part/1") == SERVING
        server.health.forget("part/1")
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check_health(channel, "part/1")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watcher_sees_every_change(build: BuildServer) -> None:
    server = build(Probe())
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
        assert (await anext(watch)).status == SERVING
        server.set_serving(SERVICE, False)
        assert (await anext(watch)).status == NOT_SERVING
        server.set_serving(SERVICE, True)
        assert (await anext(watch)).status == SERVING


async def test_health_stays_down_once_draining(build: BuildServer) -> None:
    probe = Probe()
    probe.answer = probe.hang
    server = build(probe, EdgeConfig("127.0.0.1:0", drain_timeout_s=0.3))
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
        assert (await anext(watch)).status == SERVING
        stream = aiter(stub(channel).ReadBlob(READ))
        await anext(stream)
        draining = asyncio.create_task(server.drain())
        assert (await anext(watch)).status == NOT_SERVING
        server.set_serving(SERVICE, True)
        await asyncio.sleep(0.05)
        assert await check_health(channel, SERVICE) == NOT_SERVING
        await draining
