"""`kiln doctor`: on this host, and for trn2 on a host that stand-ins for libnrt and Neuron's packages make up."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tarfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from kiln_client.cli import doctor
from kiln_client.doctor import checks
from kiln_client.doctor.checks import CHECKS
from kiln_client.doctor.one_layer import GOLDEN

from tests.neuron.host import nrt_library
from tests.neuron.stand_in import make_environment
from tests.neuron.standin import VERSIONS, make_interpreter
from tests.repository import ROOT
from tests.service.clients.conftest import Kiln

__all__ = ["nrt_library"]

TAGS = ["context_encoding_8", "token_generation_32"]
DRIVER = "2.30.2.0"


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
        self.faults = Path(os.environ["NEURON_STAND_IN_FAULTS"])
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

    def suffer(self, cause: str) -> None:
        """Sets a variable of the stand-in for libnrt, `NAME=VALUE`, or one fault of its calls."""
        name, separator, value = cause.partition("=")
        if separator:
            self._patch.setenv(name, value)
        else:
            self.faults.write_text(f"{cause}\n")

    def order(self, **orders: Any) -> None:
        """Says how the next compile ends."""
        path = self._directory / "neuronx-cc.json"
        path.write_text(json.dumps(orders))
        self._patch.setenv("NEURON_TEST_NEURONX_CC", str(path))


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


@pytest.mark.slow
def test_every_check_is_ok(kiln: Kiln, host: Host) -> None:
    records = examine(kiln)
    assert {name: one["status"] for name, one in records.items()} == dict.fromkeys(
        ("driver", "library", "cores", "packages", "compile", "step"), "ok"
    )
    assert records["driver"]["details"] == {"devices": ["/dev/neuron0"], "driver": DRIVER}
    assert records["library"]["details"]["version"] == "2.34.10.0"
    cores = records["cores"]["details"]
    assert (cores["total"], cores["lnc"], cores["free"]) == (2, 2, [0, 1])
    assert records["packages"]["details"]["pins"] == VERSIONS
    assert records["compile"]["details"]["executables"] == TAGS
    assert records["step"]["details"]["deviation"] < 1e-6


@pytest.mark.slow
def test_a_host_without_a_device_shows_all_that_needs_none(kiln: Kiln, host: Host, tmp_path: Path) -> None:
    shutil.rmtree(host.root)
    report = tmp_path / "report.tar.gz"
    records = examine(kiln, "--compile-only", "--report", str(report))
    assert {name: one["status"] for name, one in records.items()} == {"packages": "ok", "compile": "ok"}
    with tarfile.open(report) as archive:
        assert {"result.json", "host.json", "files/compiler.log"} <= set(archive.getnames())


def test_a_host_without_the_driver(kiln: Kiln, host: Host) -> None:
    shutil.rmtree(host.root)
    records = examine(kiln, "--check", "cores", fails="driver")
    assert records["driver"]["summary"].startswith("no device file /dev/neuron*")
    assert "aws-neuronx-dkms=" in records["driver"]["advice"]
    assert (records["cores"]["status"], records["cores"]["summary"]) == ("not_run", "needs driver")
    assert records["library"]["status"] == "ok"


class TestLibrary:
    def test_without_it(self, kiln: Kiln, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(host.root))
        records = examine(kiln, "--check", "library", fails="library")
        assert "libnrt.so.1" in records["library"]["summary"]
        assert "aws-neuronx-runtime-lib=" in records["library"]["advice"]

    @pytest.mark.slow
    def test_without_a_call(self, kiln: Kiln, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        library = host.root / "libnrt.so.1"
        subprocess.run(
            ["gcc", "-shared", "-x", "c", "-", "-o", library], input=b"int nrt_init(void) { return 0; }", check=True
        )
        monkeypatch.setenv("LD_LIBRARY_PATH", str(host.root))
        records = examine(kiln, "--check", "library", fails="library")
        missing = records["library"]["details"]["missing"]
        assert "nrt_init" not in missing
        assert {"nrt_execute", "nrt_tensor_free"} <= {*missing}
        assert "libnrt of unknown version has no " in records["library"]["summary"]


class TestCores:
    @pytest.mark.parametrize(
        ("busy", "free", "fails", "text"),
        [
            ([0], [1], "", "2 logical cores of 2 physical each (LNC 2), 1 free"),
            pytest.param([0, 1], [], "cores", "neuron-ls", marks=pytest.mark.slow),
        ],
    )
    def test_those_that_other_processes_have(
        self, kiln: Kiln, host: Host, *, busy: list[int], free: list[int], fails: str, text: str
    ) -> None:
        with ExitStack() as stack:
            for core in busy:
                path = Path(os.environ["NEURON_STAND_IN_DIRECTORY"]) / f"dev/neuron{core}"
                fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
            found = examine(kiln, "--check", "cores", fails=fails)["cores"]
        assert (found["details"]["free"], found["details"]["busy"]) == (free, busy)
        assert text in f"{found['summary']} {found['advice']}"

    @pytest.mark.parametrize(
        ("cause", "summary", "advice"),
        [
            ("NEURON_STAND_IN_FAMILY=2", "target.kind: got trn2; accepted: trn1", "kiln doctor --target trn1"),
            *(
                pytest.param(*row, marks=pytest.mark.slow)
                for row in (
                    ("NEURON_STAND_IN_CORES=0", "libnrt sees no core", "neuron-ls"),
                    ("nrt_init 6", "core 0: the core cannot go on without a reset: nrt_init ended with", "dmesg"),
                    ("nrt_get_total_vnc_count 1", "nrt_get_total_vnc_count failed: NRT_FAILURE", "neuron-ls"),
                )
            ),
        ],
        ids=["kind", "none", "broken", "uncounted"],
    )
    def test_what_is_wrong_with_them(self, kiln: Kiln, host: Host, cause: str, summary: str, advice: str) -> None:
        host.suffer(cause)
        found = examine(kiln, "--check", "cores", fails="cores")["cores"]
        assert summary in found["summary"]
        assert advice in found["advice"]

    @pytest.mark.slow
    def test_a_size_of_cores_that_the_host_has_set(self, kiln: Kiln, host: Host) -> None:
        host.suffer("NEURON_LOGICAL_NC_CONFIG=1")
        assert examine(kiln, "--check", "cores")["cores"]["details"]["lnc"] == 1

    def test_a_library_that_hangs(self, kiln: Kiln, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        host.suffer(f"nrt_init wait {host.root / 'never'}")
        limited = [replace(one, limit_s=1.0) if one.name == "cores" else one for one in CHECKS["trn2"]]
        monkeypatch.setattr(checks, "CHECKS", {"trn2": limited})
        found = examine(kiln, "--check", "cores", fails="cores")["cores"]
        assert found["summary"].startswith("did not end within 1 s")
        children = psutil.Process().children(recursive=True)
        assert [one for one in children if "inspection" in " ".join(one.cmdline())] == []


class TestPackages:
    @pytest.mark.parametrize(
        ("changes", "summary"),
        [
            (
                {"neuronx-cc": "2.26.6360.0"},
                "neuronx-cc 2.26.6360.0, needed 2.27.5334.0; wrong results of casts from 64-bit to 32-bit",
            ),
            ({"torch-xla": None, "libneuronxla": None}, "it lacks torch-xla, libneuronxla"),
        ],
    )
    def test_others(self, kiln: Kiln, host: Host, changes: dict[str, str | None], summary: str) -> None:
        host.install({name: version for name, version in (VERSIONS | changes).items() if version})
        found = examine(kiln, "--check", "packages", fails="packages")["packages"]
        assert summary in found["summary"]
        interpreter = os.environ["KILN_COMPILER_NEURON_PYTHON"]
        assert found["advice"].startswith(f"{interpreter} -m pip install --extra-index-url https://pip.repos.neuron.")

    def test_those_that_are_there_and_cannot_be_imported(self, kiln: Kiln, host: Host) -> None:
        """A wheel that NxD imports and does not ask for may be missing, whatever versions the others have."""
        installed = Path(os.environ["KILN_COMPILER_NEURON_PYTHON"]).parent / "installed"
        (installed / "neuronx_distributed").mkdir()
        (installed / "neuronx_distributed/__init__.py").write_text("import nkilib\n")
        found = examine(kiln, "--check", "packages", fails="packages")["packages"]
        assert "trace.functions cannot be imported: ModuleNotFoundError: No module named 'nkilib'" in found["summary"]

    def test_an_interpreter_that_does_not_start(self, kiln: Kiln, host: Host) -> None:
        words = ("--check", "packages", "--neuron-python", "/nowhere/python")
        found = examine(kiln, *words, fails="packages")["packages"]
        assert found["summary"] == "/nowhere/python does not start"
        assert "--neuron-python" in found["advice"]


@pytest.mark.slow
class TestCompileAndStep:
    def test_a_compiler_that_fails(self, kiln: Kiln, host: Host) -> None:
        host.order(error="exit code 70", log="[NCC_EVRF007] too many instructions")
        records = examine(kiln, fails="compile")
        found = records["compile"]
        assert found["summary"].startswith("NEURON_COMPILER_FAILED: ")
        assert "[NCC_EVRF007] too many instructions" in found["summary"]
        log = Path(found["details"]["log"])
        assert found["advice"] == f"less {log}"
        assert "ready" not in log.read_text()
        assert records["step"]["summary"] == "needs compile"
        shutil.rmtree(log.parent)

    def test_other_numbers(self, kiln: Kiln, host: Host) -> None:
        host.answer([GOLDEN[0], [1.1 * logit for logit in GOLDEN[1]]])
        found = examine(kiln, fails="step")["step"]
        assert found["summary"].startswith("logits differ by ")
        assert found["details"]["deviation"] > found["details"]["tolerance"] == 1e-2

    def test_a_core_that_breaks(self, kiln: Kiln, host: Host) -> None:
        host.suffer("nrt_execute 1202")
        found = examine(kiln, fails="step")["step"]
        assert "DEVICE_BROKEN" in found["summary"]
        shutil.rmtree(Path(found["details"]["log"]).parent)

    def test_cpu(self, kiln: Kiln) -> None:
        records = examine(kiln, target="cpu")
        assert [*records] == ["tools", "compile", "step"]
        assert records["step"]["details"]["deviation"] < 1e-5


def test_a_host_without_anything_of_neuron(kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HOST_ROOT", tmp_path)
    monkeypatch.delenv("KILN_COMPILER_NEURON_PYTHON", raising=False)
    outcome = kiln("doctor", "--target", "trn2")
    assert outcome.exit_code == 1
    results = [line for line in outcome.out.splitlines() if not line.startswith(" ")]
    assert [line[:19].strip() for line in results[:-1]] == [
        "failed   driver",
        "failed   library",
        "not run  cores",
        "failed   packages",
        "not run  compile",
        "not run  step",
    ]
    assert results[-1] == "trn2: 0 ok, 3 failed, 3 not run"
    assert outcome.out.count("next: ") == 3
    assert "python3.11 -m venv .venv-neuron && " in outcome.out
    page = (ROOT / "docs/neuron.md").read_text()
    assert [line for line in outcome.out.splitlines()[:5] if line.rstrip() not in page] == []


def test_the_tools_of_this_host(kiln: Kiln) -> None:
    outcome = kiln("doctor", "--check", "tools")
    assert outcome.out.splitlines()[-1] == "every check for cpu is ok"
    assert outcome.exit_code == 0


def test_a_check_that_there_is_not(kiln: Kiln) -> None:
    outcome = kiln("doctor", "--check", "cores", "--json")
    assert outcome.exit_code == 2
    assert "got cores; accepted for cpu: tools, compile, step" in outcome.error["message"]
