"""`kiln doctor`: on this host, and for trn2 on a host that stand-ins for libnrt and Neuron's packages make up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln_client.cli import doctor
from kiln_client.doctor.one_layer import GOLDEN

from tests.neuron.host import nrt_library
from tests.neuron.stand_in import make_environment
from tests.neuron.standin import VERSIONS, make_interpreter
from tests.service.clients.conftest import Outcome

__all__ = ["nrt_library"]

Kiln = Callable[..., Outcome]
Doctor = Callable[..., dict[str, Any]]
TAGS = ["context_encoding_8", "token_generation_32"]
DRIVER = "2.29.0.0"


class Host:
    """A host with two cores, on which every check for trn2 is ok."""

    def __init__(self, directory: Path, library: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = directory / "root"
        self._directory = directory
        self._patch = patch
        self.add_driver()
        patch.setattr(doctor, "HOST_ROOT", self.root)
        for name, value in make_environment(library, directory / "cores").items():
            patch.setenv(name, value)
        self.faults = Path(os.environ["NRT_STAND_IN_FAULTS"])
        self.install(VERSIONS)
        self.answer(GOLDEN)

    def add_driver(self) -> None:
        (self.root / "dev").mkdir(parents=True)
        (self.root / "dev/neuron0").touch()
        module = self.root / "sys/module/neuron"
        module.mkdir(parents=True)
        (module / "version").write_text(f"{DRIVER}\n")

    def install(self, versions: dict[str, str]) -> None:
        """Makes an interpreter with Neuron's packages."""
        place = self._directory / f"interpreter-{len(list(self._directory.iterdir()))}"
        place.mkdir()
        self._patch.setenv("KILN_COMPILER_NEURON_PYTHON", str(make_interpreter(place, versions)))

    def answer(self, rows: Any) -> None:
        """Says what the NEFFs of the next compile return."""
        self.order(answers={tag: [*row] for tag, row in zip(TAGS, rows, strict=True)})

    def order(self, **orders: Any) -> None:
        """Says how the next compile ends."""
        path = self._directory / "neuronx-cc.json"
        path.write_text(json.dumps(orders))
        self._patch.setenv("KILN_TEST_NEURONX_CC", str(path))


@pytest.fixture
def host(tmp_path: Path, nrt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, nrt_library, monkeypatch)


def examine(kiln: Kiln, *words: str, fails: str = "", target: str = "trn2") -> dict[str, Any]:
    """Runs checks; returns the records by name. None but `fails` failed, and the exit code and the result say so."""
    outcome = kiln("doctor", "--target", target, *words, "--json")
    records = {one["check"]: one for one in outcome.last["checks"]}
    assert [one["check"] for one in outcome.lines if one["event"] == "check"] == [*records]
    assert [name for name, one in records.items() if one["status"] == "failed"] == ([fails] if fails else [])
    assert outcome.last["ok"] == (not fails)
    assert outcome.exit_code == (1 if fails else 0)
    assert all(bool(one["advice"]) == (one["status"] == "failed") for one in records.values())
    return records


def test_every_check_is_ok(kiln: Kiln, host: Host) -> None:
    records = examine(kiln)
    assert {name: one["status"] for name, one in records.items()} == dict.fromkeys(
        ("driver", "library", "cores", "packages", "compile", "step"), "ok"
    )
    assert records["driver"]["details"] == {"devices": ["/dev/neuron0"], "driver": DRIVER}
    assert records["library"]["details"]["version"] == "2.33.10.0"
    cores = records["cores"]["details"]
    assert (cores["total"], cores["lnc"], cores["free"]) == (2, 2, [0, 1])
    assert records["packages"]["details"]["pins"] == VERSIONS
    assert records["compile"]["details"]["executables"] == TAGS
    assert records["step"]["details"]["deviation"] < 1e-6
