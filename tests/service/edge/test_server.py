import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from google.longrunning import operations_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kiln.bundle.v1 import bundle_pb2

from edge.access.config import AccessConfig
from edge.config import EdgeConfig, TlsConfig
from edge.errors import AddressUnavailable
from tests.hang_guard import HANG_S, until
from tests.repository import ROOT
from tests.running_time import running_time
from tests.servers.certificates import make_certificate
from tests.servers.probe import (
    CHUNK,
    GET,
    NOT_SERVING,
    READ,
    SERVICE,
    SERVING,
    Probe,
    answer,
    answer_after,
    check_health,
    hang,
    own_channel,
    serve,
    stub,
)
from tests.servers.refusals import refused


async def reflect(
    channel: grpc.aio.Channel, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
    return await anext(aiter(call))


async def test_an_old_connection_is_replaced_and_its_calls_finish() -> None:
    release = asyncio.Event()
    probe = Probe(answer_after(release.wait))
    async with serve(probe, EdgeConfig("127.0.0.1:0", drain_timeout_s=5, max_connection_age_s=0.5)) as channel:
        assert await check_health(channel) == SERVING
        stream = aiter(stub(channel).ReadBlob(READ))
        await anext(stream)
        first_peer = probe.peer
        probe.answer = answer

        async def is_replaced() -> bool:
            await stub(channel).GetBundle(GET)
            return probe.peer not in ("", first_peer)

        await until(is_replaced)
        release.set()
        assert [response async for response in stream] == [CHUNK]


async def test_reflection_lists_the_services_and_describes_them() -> None:
    async with serve(Probe()) as channel:
        listed = await reflect(channel, reflection_pb2.ServerReflectionRequest(list_services=""))
        assert {service.name for service in listed.list_services_response.service} == {
            SERVICE,
            "google.longrunning.Operations",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for symbol, package in [
            (SERVICE, "kiln.bundle.v1"),
            (operations_pb2.Operation.DESCRIPTOR.full_name, "google.longrunning"),
        ]:
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
            described = await reflect(channel, request)
            files = [
                FileDescriptorProto.FromString(data)
                for data in described.file_descriptor_response.file_descriptor_proto
            ]
            assert package in {file.package for file in files}


async def test_drain_reports_first_and_lets_running_calls_finish() -> None:
    release = asyncio.Event()
    probe = Probe(answer_after(release.wait))
    async with serve(probe, EdgeConfig("127.0.0.1:0", drain_timeout_s=2 * HANG_S)) as channel:
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
        assert (await anext(watch)).status == SERVING
        stream = aiter(stub(channel).ReadBlob(READ))
        assert await anext(stream) == CHUNK
        draining = asyncio.create_task(probe.server.drain())
        assert (await anext(watch)).status == NOT_SERVING
        probe.server.health.set_serving(SERVICE, True)
        assert await check_health(channel, SERVICE) == NOT_SERVING, "it stays down"
        assert await check_health(channel, "liveness") == SERVING
        assert (await refused(stub(channel).GetBundle(GET), "UNAVAILABLE", "SHUTTING_DOWN")).retry_after_s == 1
        assert not draining.done()
        assert not probe.left.is_set()
        release.set()
        assert await anext(stream) == CHUNK
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        # The watch is still open, and does not hold the server up.
        await asyncio.wait_for(draining, HANG_S)


async def test_drain_cancels_what_does_not_finish_in_time() -> None:
    probe = Probe(hang)
    async with serve(probe, EdgeConfig("127.0.0.1:0", drain_timeout_s=0.3)) as channel:
        call = asyncio.ensure_future(stub(channel).GetBundle(GET))
        await probe.entered.wait()
        start_s = time.monotonic()
        with running_time() as taken:
            await probe.server.drain()
        assert time.monotonic() - start_s >= 0.3
        assert taken.s < 2
        assert probe.left.is_set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


async def test_a_taken_address_and_one_of_another_machine_are_named() -> None:
    first = Probe()
    elsewhere = EdgeConfig("192.0.2.1:0", allow_insecure=True, access=AccessConfig(allow_anonymous=True))
    async with serve(first):
        for config in (EdgeConfig(first.address), elsewhere):
            with pytest.raises(AddressUnavailable) as caught:
                async with serve(Probe(), config):
                    pass
            assert caught.value.metadata == {"address": config.address}


async def test_port_is_free_again_after_draining() -> None:
    async with serve(probe := Probe()):
        pass
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(probe.address.rpartition(":")[2])))


async def test_message_limit_holds_in_both_directions() -> None:
    config = EdgeConfig("127.0.0.1:0", max_message_bytes=1 << 20)
    probe = Probe()
    async with serve(probe, config) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).GetBundle(bundle_pb2.GetBundleRequest(ref="x" * (1 << 20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not probe.entered.is_set()
        await stub(channel).GetBundle(bundle_pb2.GetBundleRequest(ref="x" * ((1 << 20) - 100)))

        async def answer_at_length() -> bundle_pb2.GetBundleResponse:
            return bundle_pb2.GetBundleResponse(bundle=bundle_pb2.Bundle(manifest_json=bytes(1 << 20)))

        probe.answer = answer_at_length
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).GetBundle(GET)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty SETTINGS
HTTP2_PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8)


@pytest.mark.parametrize(("min_ping_interval_s", "survives"), [(0.05, True), (10, False)])
async def test_pings_are_limited_as_configured(min_ping_interval_s: float, survives: bool) -> None:
    # Spoken by hand, because gRPC's own client pings at most once a second.
    config, probe = EdgeConfig("127.0.0.1:0", min_ping_interval_s=min_ping_interval_s), Probe()
    async with serve(probe, config), asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(probe.address.rpartition(":")[2]))
        writer.write(HTTP2_PREFACE)
        received, num_acknowledged = b"", 0
        for number in range(1, 7):
            writer.write(HTTP2_PING)
            # The next one is sent behind the answer to this one, so that the server never finds two at once.
            while num_acknowledged < number and not reader.at_eof() and b"too_many_pings" not in received:
                received += await reader.read(1 << 16)
                num_acknowledged = received.count(bytes([0, 0, 8, 6, 1]))
            if num_acknowledged < number:
                break
            await asyncio.sleep(0.1)
        writer.close()
    assert (b"too_many_pings" not in received) == survives
    assert num_acknowledged >= (6 if survives else 1)


async def test_tls_with_a_certificate_of_our_own(tmp_path: Path) -> None:
    ours, other = (make_certificate(tmp_path, name) for name in ("ours", "other"))
    trusting, stranger = (grpc.ssl_channel_credentials(one.certificate.read_bytes()) for one in (ours, other))
    probe, config = Probe(), EdgeConfig("127.0.0.1:0", tls=TlsConfig(ours.certificate, ours.key))
    async with serve(probe, config, connect=lambda address: grpc.aio.secure_channel(address, trusting)) as channel:
        assert await check_health(channel, SERVICE) == SERVING
        for refused_channel in (grpc.aio.secure_channel(probe.address, stranger), own_channel(probe.address)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check_health(refused_channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await refused_channel.close()


SERVE = """
import asyncio, sys
from edge.logs import configure_logging
from edge.server import EdgeConfig
from tests.servers.probe import Probe, answer_after, make_server

configure_logging("probe")

async def main():
    async def wait():
        print("entered", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
        print("answered", flush=True)
    server = make_server(Probe(answer_after(wait)), EdgeConfig("127.0.0.1:0", drain_timeout_s=30))
    print(await server.start(), flush=True)
    await server.serve_until_signalled()
    print("drained", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("impatient", [False, True])
async def test_signal_drains_and_a_second_one_does_not_wait(number: signal.Signals, impatient: bool) -> None:
    process = subprocess.Popen(  # noqa: ASYNC220 - read in threads below
        [sys.executable, "-c", SERVE, "60" if impatient else "0.5"],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    port = int(await asyncio.to_thread(process.stdout.readline))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = asyncio.ensure_future(stub(channel).GetBundle(GET))
        assert await asyncio.to_thread(process.stdout.readline) == b"entered\n"
        process.send_signal(number)
        if impatient:
            await asyncio.sleep(0.3)
            assert process.poll() is None
            process.send_signal(number)
            with pytest.raises(grpc.aio.AioRpcError):
                await call
        else:
            assert await call == bundle_pb2.GetBundleResponse()
    output, logs = await asyncio.to_thread(process.communicate, timeout=HANG_S)
    lines = output.decode().splitlines()
    assert ("answered" in lines) != impatient
    assert lines[-1] == "drained"
    events = [json.loads(line)["event"] for line in logs.splitlines()]
    again = ["signalled again"] if impatient else []
    assert events == ["listening", "signalled", "draining", *again, "call", "stopped"]
    assert process.returncode == 0
