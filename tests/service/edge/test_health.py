from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.servers.probe import NOT_SERVING, SERVICE, SERVICE_UNKNOWN, SERVING, Probe, check_health, serve


async def test_health_is_per_service() -> None:
    probe = Probe()
    async with serve(probe, prepare=lambda server: server.health.set_serving(SERVICE, False)) as channel:
        assert await check_health(channel) == SERVING
        assert await check_health(channel, "google.longrunning.Operations") == SERVING
        assert await check_health(channel, SERVICE) == NOT_SERVING
        probe.server.health.set_serving(SERVICE, True)
        probe.server.health.set_serving("", False)
        assert await check_health(channel, SERVICE) == SERVING
        assert await check_health(channel) == NOT_SERVING


async def test_names_come_and_go() -> None:
    probe = Probe()
    async with serve(probe) as channel:
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="part/1")))
        assert (await anext(watch)).status == SERVICE_UNKNOWN
        assert await check_health(channel, "part/1") == SERVICE_UNKNOWN
        probe.server.health.set_serving("part/1", True)
        assert (await anext(watch)).status == SERVING
        assert await check_health(channel, "part/1") == SERVING
        probe.server.health.forget("part/1")
        assert (await anext(watch)).status == SERVICE_UNKNOWN
        assert await check_health(channel, "part/1") == SERVICE_UNKNOWN
