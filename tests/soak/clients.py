"""What clients do with streams, well-behaved and otherwise: one row for each behaviour."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1 import generation_pb2_grpc

from tests.soak.references import LAST_PROMPT, MAX_ANSWER, PROMPTS, greedy_request
from tests.soak.services import STALL_TIMEOUT_S
from tests.soak.site import END_TIMEOUT_S, LASTING, Site
from tests.soak.streams import Stream
from tests.soak.windows import ABORTED

COUNTS: Final = (1, 8, 40, MAX_ANSWER)
#: Share of the requests that go to deployments that come and go.
PASSING_SHARE: Final = 0.15
#: Sessions that all clients use, of each deployment; more than its KV cache keeps.
NUM_SESSIONS: Final = 16
#: A window of HTTP/2 that does not grow, as that of a client that means harm.
SMALL_WINDOW: Final = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
#: Connections of their own, so that they can be closed without harm to other clients.
OWN_CONNECTION: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
#: Larger than any request that the deployments take.
LARGE: Final = pb.TokenIds(ids=[3] * (4 << 20))


@dataclass
class Client:
    """One client of many: where it calls, and its own random numbers."""

    number: int
    site: Site
    choose: random.Random
    stub: Any
    num_requests: int = 0

    @property
    def address(self) -> str:
        return self.site.services.runtime.address

    def open_channel(self, address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=(*OWN_CONNECTION, *options))


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(64 << 10):
            sink.write(data)
            await sink.drain()
    sink.close()


@asynccontextmanager
async def open_relay(address: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A TCP relay to an address, on loopback, and what resets its connections, as a network or a dead client does."""
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, out = await asyncio.open_connection(host, int(port))
        writers.extend((writer, out))
        await asyncio.gather(_pass_on(reader, out), _pass_on(theirs, writer))

    def cut() -> None:
        for writer in writers:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        server.close()
        cut()


async def read(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    await stream.read(client.stub.Generate(request))


async def sample(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Asks for tokens at random: company for the greedy ones."""
    stream.prompt = ""
    request.sampling.temperature = 1
    request.sampling.top_p = 0.9
    await read(client, request, stream)


async def read_slowly(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Pauses now and then, always less than the stall timeout."""
    async for _ in stream.events(client.stub.Generate(request)):
        if client.choose.random() < 0.1:
            await asyncio.sleep(client.choose.random() * 0.4)


async def cancel(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Cancels after some events, or before the first."""
    call = client.stub.Generate(request)
    left = client.choose.choice((0, 1, 2, 10))
    if left == 0:
        await asyncio.sleep(client.choose.random() * 0.05)
        stream.has_left = call.cancel()
    async for _ in stream.events(call):
        left -= 1
        if left == 0:
            stream.has_left = call.cancel()


async def set_deadline(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Gives the call less time than it may need."""
    timeout_s = client.choose.choice((0.02, 0.2, 1.0, 3.0))
    await stream.read(client.stub.Generate(request, timeout=timeout_s))
    # At the deadline by its own clock, gRPC drops events that its caller has not read, and may still give their status.
    stream.has_left = stream.code == "DEADLINE_EXCEEDED" and time.monotonic() - stream.begun_s >= timeout_s


async def abort(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Ends the request by another call."""
    abortion = pb.AbortRequest(deployment_id=request.deployment_id, request_id=request.request_id)
    async for event in stream.events(client.stub.Generate(request)):
        if event.sequence_number == 0:
            with suppress(grpc.aio.AioRpcError):
                await client.stub.Abort(abortion, timeout=END_TIMEOUT_S)


async def drop(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Loses the connection, without a word to the server."""
    left = client.choose.choice((1, 2, 10))
    async with open_relay(client.address) as (address, cut), client.open_channel(address) as channel:
        async for _ in stream.events(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)):
            left -= 1
            if left == 0:
                cut()
                stream.has_left = True


async def hang_up(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Closes the connection while the stream runs."""
    async with client.open_channel(client.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        events = stream.events(call)
        async for _ in events:
            break
        stream.has_left = True
        await channel.close()
        async for _ in events:
            pass
    stream.code = stream.code or "CANCELLED"


async def never_read(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Reads nothing until long after the server has given up, then what is there."""
    request.output.logits = True
    request.stop.max_new_tokens = stream.count = MAX_ANSWER
    async with client.open_channel(client.address, *SMALL_WINDOW) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        await asyncio.sleep(STALL_TIMEOUT_S * client.choose.uniform(1, 3))
        await stream.read(call)


async def read_or_leave(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    await (cancel if client.choose.random() < 0.2 else read)(client, request, stream)


async def converse(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Continues what any client sent in the same session, as far as the prompt is the same; now and then leaves."""
    request.session_id = f"session-{client.choose.randrange(NUM_SESSIONS)}"
    await read_or_leave(client, request, stream)


async def ask_for_several(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Asks for several sequences of the prompt, which greedy sampling makes equal; now and then leaves."""
    request.num_sequences = stream.num_sequences = client.choose.randint(2, 4)
    await read_or_leave(client, request, stream)


async def capture(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Has inputs written to the runtime's disk, and removes the file."""
    request.output.capture_inputs.num_steps = 4
    await read(client, request, stream)
    folder = client.site.services.capture / request.deployment_id
    (folder / f"{request.request_id}.safetensors").unlink(missing_ok=True)
    if stream.finished is not None and stream.finished.HasField("capture_status"):
        client.site.ends["capture"]["lost file"] += 1


async def exceed(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Sends megabytes."""
    request.token_ids.CopyFrom(LARGE)
    await read(client, request, stream)


async def mistake(client: Client, request: pb.GenerateRequest, stream: Stream) -> None:
    """Sends what no deployment takes."""
    match client.choose.randrange(3):
        case 0:
            request.deployment_id = "nowhere"
        case 1:
            request.sampling.temperature = -1
        case _:
            request.ClearField("prompt")
    await read(client, request, stream)


class Behaviour(NamedTuple):
    """What a client does with a request and its stream, how often, in proportion, and with which reasons it ends."""

    name: str
    weight: int
    act: Callable[[Client, pb.GenerateRequest, Stream], Awaitable[None]]
    reasons: frozenset[str] = frozenset()


BEHAVIOURS: Final = (
    Behaviour("read", 30, read),
    Behaviour("sample", 8, sample),
    Behaviour("read slowly", 8, read_slowly),
    Behaviour("cancel", 12, cancel),
    Behaviour("deadline", 12, set_deadline, frozenset({"DEADLINE_EXCEEDED"})),
    Behaviour("abort", 6, abort, ABORTED),
    Behaviour("drop", 4, drop),
    Behaviour("hang up", 4, hang_up),
    Behaviour("never read", 4, never_read, frozenset({"CLIENT_STALLED"})),
    Behaviour("converse", 12, converse, frozenset({"SESSION_BUSY", "TOO_MANY_SESSIONS"})),
    Behaviour("ask for several", 6, ask_for_several),
    Behaviour("capture", 4, capture, frozenset({"TOO_MANY_CAPTURES"})),
    Behaviour("exceed", 1, exceed, frozenset({"REQUEST_TOO_LARGE"})),
    Behaviour("mistake", 3, mistake, frozenset({"REQUEST_INVALID", "DEPLOYMENT_NOT_FOUND"})),
)
#: With which any request may be refused.
ALWAYS: Final = frozenset({"QUEUE_FULL"})


async def keep_calling(client: Client, is_over: asyncio.Event) -> None:
    """Makes one call after the other until the run is over."""
    while not is_over.is_set():
        (behaviour,) = client.choose.choices(BEHAVIOURS, [one.weight for one in BEHAVIOURS])
        await call_once(client, behaviour)
        await asyncio.sleep(client.choose.random() * 0.1)


async def call_once(client: Client, behaviour: Behaviour) -> None:
    """Makes one call and has its end checked."""
    site, choose = client.site, client.choose
    is_passing = site.passing and choose.random() < PASSING_SHARE
    deployment_id = choose.choice(site.passing if is_passing else list(LASTING))
    prompt, count = choose.choice([one for one in PROMPTS if one != LAST_PROMPT]), choose.choice(COUNTS)
    request = greedy_request(deployment_id, prompt, count)
    client.num_requests += 1
    request.request_id = f"c{client.number}-{client.num_requests}"
    stream = Stream(behaviour.name, deployment_id, prompt, count, behaviour.reasons | ALWAYS)
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await behaviour.act(client, request, stream)
    except TimeoutError:
        site.find(
            f"{behaviour.name} of {deployment_id} did not end in {END_TIMEOUT_S:g} s, after {len(stream.kinds)} events"
        )
        return
    site.take(stream)


def clean_captures(directory: Path) -> None:
    """Removes files of requests that ended after their clients had removed what was there."""
    for path in directory.rglob("*.safetensors"):
        path.unlink(missing_ok=True)
