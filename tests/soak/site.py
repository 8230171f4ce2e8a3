"""The place of a soak: the services, the deployments that there are now, and what has been found."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from typing import Any, Final

import grpc
from kiln.runtime.v1 import generation_pb2_grpc, runtime_pb2_grpc
from kiln.runtime.v1 import runtime_pb2 as pb

from tests.servers.answers import reason_of
from tests.soak.references import MAX_ANSWER, PROMPTS, References, greedy_request
from tests.soak.services import Services
from tests.soak.streams import Stream
from tests.soak.windows import Windows

State = pb.Deployment.State

#: The deployment whose requests share blocks of the KV cache.
SHARING: Final = "sharing"
#: By deployment that lasts for the whole run, the bundles whose weights it may have.
LASTING: Final = {"steady": ("story-1",), "swapped": ("story-2", "pirate-2"), SHARING: ("story-blocks",)}
#: How long a deployment may take to serve again, a hung rank and a new forkserver included.
READY_TIMEOUT_S: Final = 120.0
#: How long a deployment has to be READY: it may not have noticed yet that a rank has ended.
STEADY_S: Final = 0.5
#: How long any call may take to end in any way.
END_TIMEOUT_S: Final = 240.0
MAX_FINDINGS: Final = 200


class Site:
    """One soak under way."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.windows = Windows()
        self.references = References()
        #: Deployments that come and go.
        self.passing: list[str] = []
        #: What must not be, at most MAX_FINDINGS of it.
        self.findings: list[str] = []
        #: Ends of streams by behaviour, of operations by name.
        self.ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.num_compared = 0
        #: Digests of the bundles whose weights are used, by reference.
        self.digests: dict[str, str] = {}
        #: Answers of epochs whose weights are not known yet.
        self._undecided: list[Stream] = []
        self.num_streams = 0
        self.begun_s = time.monotonic()
        self.channel = grpc.aio.insecure_channel(services.runtime.address)
        self.control: Any = runtime_pb2_grpc.RuntimeServiceStub(self.channel)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def find(self, finding: str) -> None:
        """Notes a finding, with the time of the run."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(f"{time.monotonic() - self.begun_s:.1f} s: {finding}")

    async def load(self, deployment_id: str, ref: str) -> pb.Deployment:
        """Loads a bundle and notes the epoch of its weights."""
        request = pb.LoadBundleRequest(ref=ref, deployment_id=deployment_id)
        async for _ in self.control.LoadBundle(request, timeout=END_TIMEOUT_S):
            pass
        return await self.get(deployment_id)

    async def get(self, deployment_id: str) -> pb.Deployment:
        """Asks for a deployment, and notes the weights of its epoch."""
        request = pb.GetDeploymentRequest(deployment_id=deployment_id)
        deployment: pb.Deployment = (await self.control.GetDeployment(request, timeout=END_TIMEOUT_S)).deployment
        self.note_weights(deployment)
        return deployment

    def note_weights(self, deployment: pb.Deployment) -> None:
        """Remembers which weights the epoch of a deployment has."""
        for role in deployment.roles:
            self.references.note_epoch(deployment.id, role.weight_epoch, role.weights_digest)

    async def wait_ready(self, cause: str) -> None:
        """Waits until the lasting deployments are READY and stay so; it is a finding if they do not become so.

        Raises:
            SiteLost: One does not.
        """
        end_s = time.monotonic() + READY_TIMEOUT_S
        since_s = time.monotonic()
        while time.monotonic() - since_s < STEADY_S:
            for deployment_id in LASTING:
                deployment = await self.get(deployment_id)
                if deployment.state == State.STATE_READY:
                    continue
                if deployment.state == State.STATE_FAILED or time.monotonic() > end_s:
                    state = State.Name(deployment.state)
                    self.find(f"{deployment_id} is {state} after {cause}: {deployment.message}")
                    raise SiteLost
                since_s = time.monotonic()
            await asyncio.sleep(0.05)

    async def learn(self) -> None:
        """Loads the lasting deployments and asks each weight set for its answers, one after the other."""
        for deployment_id, refs in LASTING.items():
            for ref in refs:
                probe = "probe"
                digest = self.digests[ref] = (await self.load(probe, ref)).roles[0].weights_digest
                for prompt in PROMPTS:
                    stream = Stream("probe", probe, prompt, MAX_ANSWER, frozenset())
                    await stream.read(self.generation.Generate(greedy_request(probe, prompt, MAX_ANSWER)))
                    self.references.add(digest, prompt, [token for _, token in stream.answers[0]])
                await self.control.UnloadBundle(pb.UnloadBundleRequest(deployment_id=probe))
            await self.load(deployment_id, refs[0])

    def take(self, stream: Stream) -> None:
        """Takes the end of a stream, and notes what is wrong with it."""
        stream.ended_s = time.monotonic()
        self.num_streams += 1
        self.ends[stream.behaviour][stream.end] += 1
        reasons = stream.reasons | self.windows.stream_reasons(stream.begun_s, stream.ended_s)
        if stream.deployment_id not in LASTING:
            reasons |= {"DEPLOYMENT_NOT_FOUND", "DEPLOYMENT_NOT_READY", "REQUEST_ABORTED"}
        name = f"{stream.behaviour} of {stream.deployment_id}"
        if stream.code != "OK" and not stream.has_left and stream.reason not in reasons:
            self.find(f"{name} ended {stream.end}")
        for fault in stream.find_faults():
            self.find(f"{name}: {fault}")
        if stream.prompt and stream.answers:
            self.num_compared += len(stream.answers) * (stream.code == "OK")
            if all(self.references.knows(stream.deployment_id, tokens) for tokens in stream.answers.values()):
                self._compare(stream)
            else:
                self._undecided.append(stream)

    def decide(self) -> None:
        """Compares the answers whose weights were not known when they came."""
        for stream in self._undecided:
            self._compare(stream)
        self._undecided.clear()

    def _compare(self, stream: Stream) -> None:
        for index, tokens in stream.answers.items():
            mistake = self.references.find_mistake(stream.deployment_id, stream.prompt, tokens)
            if mistake is not None:
                name = f"{stream.behaviour} of {stream.deployment_id}, prompt {stream.prompt!r}"
                self.find(f"{name}, sequence {index}: {mistake}")

    async def call(self, name: str, call: Any, reasons: frozenset[str], *, is_counted: bool = True) -> str:
        """Makes a call of the control plane, which may end with these reasons; returns `OK`, or code and reason.

        Args:
            is_counted: Whether the end counts in the table.
        """
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await call
            code, reason = "OK", ""
        except TimeoutError:
            self.find(f"{name} did not end in {END_TIMEOUT_S:g} s")
            raise SiteLost from None
        except grpc.aio.AioRpcError as error:
            code, reason = error.code().name, reason_of(error)
            expected = reasons | self.windows.call_reasons(begun_s, time.monotonic())
            if reason not in expected and code not in expected:
                self.find(f"{name} ended {code} {reason}: {error.details()}")
        end = f"{code} {reason}".strip()
        if is_counted:
            self.ends[name][end] += 1
        return end


class SiteLost(Exception):
    """A finding after which the run cannot go on."""
