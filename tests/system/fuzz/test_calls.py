"""Every call of both servers, with thousands of requests that no client of ours sends: each gets a named answer."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf import descriptor_pool
from kiln.compiler.v1 import compiler_pb2

from tests.fuzzed_messages import MessageFuzzer
from tests.fuzzing import SEED
from tests.repository import ROOT
from tests.servers.answers import Answer, Rpc, list_rpcs, send
from tests.servers.shared_bundles import SharedBundles
from tests.servers.stack import Stack
from tests.system.conftest import CONFIG, TINY
from tests.system.fuzz.attributes import list_documents
from tests.system.fuzz.targets import DEADLINE, ENDLESS, FOREIGN_SERVICES, Target, open_compiler, open_runtime

#: Calls that `make test` sends of each kind, and a slow run, which draws others each time and has to fit into a turn;
#: and its documents for each target.
FEW: Final = 5
MANY: Final = 1000
MANY_DOCUMENTS: Final = 2000
LONG: Final = [pytest.mark.slow, pytest.mark.timeout(1800)]
#: Of each call, between two looks at what exists.
CHUNK: Final = 250
MAX_CPU_S: Final = 2.0
#: Of a request in a message; the run's seed draws the whole of it again.
MAX_SHOWN_BYTES: Final = 200
#: What a server may have gained in the second half of its calls; it keeps some answers and statements of its database.
MAX_GROWTH_BYTES: Final = 24 << 20

#: Folder of `protos/kiln` -> who serves what is in it.
SERVED_BY: Final = {"compiler": "compiler_svc", "bundle": "compiler_svc", "config": "", "runtime": "runtime_svc"}
FAILURES: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, DEADLINE})
OPENERS: Final[dict[str, Callable[[Stack], Target]]] = {"compiler": open_compiler, "runtime": open_runtime}


@dataclass
class Findings:
    """What went wrong, and how often each call was answered how."""

    wrong: list[str] = field(default_factory=list)
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def note(self, path: str, request: bytes | str, answer: Answer) -> None:
        """Counts an answer, and keeps what has led to it if it is wrong."""
        code = "read in part" if answer.code is None else answer.code.name
        self.codes[path, code] += 1
        self.slowest_s = max(self.slowest_s, answer.cpu_s)
        if answer.code in FAILURES or answer.cpu_s > MAX_CPU_S:
            shown = request if isinstance(request, str) else f"bytes.fromhex('{request[:MAX_SHOWN_BYTES].hex()}')"
            self.wrong.append(f"{path} {code} {answer.cpu_s:.2f} s {answer.message!r}: {len(request)} bytes, {shown}")

    def describe(self) -> str:
        """How often each call was answered how."""
        lines = [f"{path} {code}: {number}\n" for (path, code), number in sorted(self.codes.items())]
        return "".join(lines) + f"slowest answer: {self.slowest_s:.2f} s\n"

    def check(self) -> None:
        """Fails with the first that went wrong."""
        assert self.wrong == [], f"{len(self.wrong)} answers, seed {SEED}:\n" + "\n".join(self.wrong[:20])


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, run_directory: Path) -> Iterator[Stack]:
    """A stack of its own: the calls remove and replace what it has."""
    stack = Stack.start(tmp_path_factory.mktemp("fuzz"), cores=3, shared=SharedBundles(run_directory / "bundles"))
    stack.provide("tiny", TINY, CONFIG)
    yield stack
    assert stack.stop() == 0


@pytest.fixture(params=list(OPENERS))
def target(attacked: Stack, request: pytest.FixtureRequest) -> Target:
    opened = OPENERS[request.param](attacked)
    opened.restore()
    return opened


def attack(target: Target, rpc: Rpc, count: int, findings: Findings) -> None:
    """Sends requests of one call."""
    choose = random.Random(f"{SEED} {rpc.path}")
    for start in range(0, count, CHUNK):
        target.restore()
        fuzzer = MessageFuzzer(choose, target.find_existing())
        for _ in range(min(CHUNK, count - start)):
            requests = [fuzzer.draw(rpc.request) for _ in range(choose.randint(1, 3) if rpc.is_client_streaming else 1)]
            max_responses = ENDLESS.get(rpc.path, choose.choice((1, 1, 3, 1000)))
            answer = send(target.channel, rpc, requests, target.meter, max_responses=max_responses)
            findings.note(rpc.path, b"".join(requests), answer)
            target.undo(rpc, answer)


def attack_all(target: Target, count: int) -> Findings:
    """Sends requests of every call, in two passes, between which the server's memory is to stay what it is."""
    findings = Findings()
    rpcs = list_rpcs(target.channel)
    resident = []
    for part in (count // 2, count - count // 2):
        for rpc in rpcs:
            attack(target, rpc, part, findings)
        resident.append(target.meter.read_resident_bytes())
    target.restore()
    findings.check()
    assert findings.codes.total() == count * len(rpcs)
    sys.stdout.write(findings.describe() + f"resident {[size >> 20 for size in resident]} MiB\n")
    assert resident[1] - resident[0] <= MAX_GROWTH_BYTES, f"resident memory rose from {resident[0]} to {resident[1]}"
    return findings


def own_services(package: str) -> frozenset[str]:
    """Full names of the services of the protos that a server has."""
    files = [
        descriptor_pool.Default().FindFileByName(str(path.relative_to(ROOT / "protos")))
        for path in (ROOT / "protos/kiln").glob("*/v1/*.proto")
        if SERVED_BY[path.parent.parent.name] == package
    ]
    return frozenset(service.full_name for file in files for service in file.services_by_name.values())


def test_every_call_is_attacked(target: Target) -> None:
    services = {rpc.path.split("/")[1] for rpc in list_rpcs(target.channel)}
    always = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert services == own_services(target.package) | FOREIGN_SERVICES[target.package] | always


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=LONG)])
def test_odd_requests_get_named_answers(target: Target, count: int) -> None:
    attack_all(target, count)


def plan(target: Target, kind: str, documents: Any, findings: Findings) -> None:
    (rpc,) = (one for one in list_rpcs(target.channel) if one.path.endswith("/PlanCompile"))
    number = compiler_pb2.Target.Kind.Value(f"KIND_{kind.upper()}")
    for path, document in documents:
        request = compiler_pb2.PlanCompileRequest(
            model=TINY.name, config_json=json.dumps(document), target=compiler_pb2.Target(kind=number)
        )
        answer = send(target.channel, rpc, [request.SerializeToString()], target.meter, max_responses=1)
        findings.note(f"PlanCompile {kind} {'.'.join(path)}", request.config_json[:500], answer)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY_DOCUMENTS, marks=LONG)])
@pytest.mark.parametrize("kind", ["cpu", "trn2"])
def test_attributes_at_boundaries_are_planned_or_refused(attacked: Stack, kind: str, count: int) -> None:
    findings, choose, target = Findings(), random.Random(SEED), open_compiler(attacked)
    documents = list(list_documents(kind, choose))
    assert len(documents) > 5000
    before = target.meter.read_resident_bytes()
    plan(target, kind, choose.sample(documents, count), findings)
    findings.check()
    assert count == FEW or target.meter.read_resident_bytes() - before <= MAX_GROWTH_BYTES
    assert findings.codes.total() == count
