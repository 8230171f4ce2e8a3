"""Two weight sets for one set of executables, and what each of them generates: a mixture of both would show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kiln.runtime.v1 import runtime_pb2 as runtime

from tests.repository import ROOT
from tests.servers.stack import Stack
from tests.system.conftest import TINY
from tests.system.runtime_process import SMALL_CONFIG, RuntimeProcess

PIRATE = ROOT / "examples/models/kiln-tiny-pirate"


@dataclass(frozen=True)
class Fleet:
    """A compiler with two weight sets for one set of executables, at one degree."""

    compiler: str
    story: str
    pirate: str
    #: What each generates, by the digest of its bundle.
    expected: dict[str, list[int]]


def provide_fleet(stack: Stack, process: RuntimeProcess) -> Fleet:
    """Compiles both at degree 2, so that a mixture over ranks would show too, and generates with each on a runtime."""
    config = {"neuron_config": {**SMALL_CONFIG["neuron_config"], "tp_degree": 2}}
    expected = {}
    for name, model in (("crash-story", TINY), ("crash-pirate", PIRATE)):
        stack.provide(name, model, config)
        digest = process.load(name, name).roles[0].bundle_digest
        expected[digest] = process.generate(deployment_id=name)
        process.unload(name)
    story, pirate = expected
    assert expected[story] != expected[pirate]
    return Fleet(stack.compiler, story, pirate, expected)


def run_until(events: Any, stage: str) -> None:
    """Takes events of a load up to a stage's first one."""
    for event in events:
        if event.progress.stage == runtime.LoadProgress.Stage.Value(f"STAGE_{stage}"):
            return
    raise AssertionError(f"no stage {stage}")


def assert_serves(process: RuntimeProcess, fleet: Fleet) -> str:
    """The tokens are those of the weights that the deployment says it has; returns their digest."""
    role = process.get().roles[0]
    assert process.generate() == fleet.expected[role.weights_digest]
    return str(role.weights_digest)
