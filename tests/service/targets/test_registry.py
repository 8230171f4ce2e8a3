from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.manifest import TargetKind
from targets.cpu import AOTI, CPU, EXPORTED_PROGRAM
from targets.errors import FormatInvalid, FormatUnknown
from targets.neuron import NEFF
from targets.registry import TARGETS, find_format
from tests.contract.executors.outside import install
from tests.contract.executors.toy_format import TOY
from tests.repository import ROOT


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for distributions of a test's own."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_kind_of_the_manifest_and_of_the_api_has_its_target() -> None:
    assert tuple(TARGETS) == get_args(TargetKind)
    assert {f"KIND_{kind.upper()}" for kind in TARGETS} == set(pb.Target.Kind.keys()) - {"KIND_UNSPECIFIED"}


def test_executables_for_neuron_are_compiled_and_run_and_not_checked_on_the_compilers_host() -> None:
    assert [kind for kind, target in TARGETS.items() if target.is_served] == [*TARGETS]
    assert [kind for kind, target in TARGETS.items() if target.is_checked_on_host] == ["cpu"]
    assert find_format(NEFF.name) is NEFF


def test_built_in_formats_need_no_installation() -> None:
    code = (
        "import sys; sys.path[:] = [one for one in sys.path if 'site-packages' not in one] + sys.argv[1:]\n"
        "from importlib.metadata import entry_points\n"
        "from targets.registry import find_format\n"
        "import json; print(json.dumps([find_format(name).suffix for name in ('aoti', 'exported_program')]))\n"
    )
    packages = Path(pytest.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-S", "-c", code, str(packages)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == [AOTI.suffix, EXPORTED_PROGRAM.suffix]


def test_a_format_from_outside_is_found_and_offered(site: Path) -> None:
    with pytest.raises(FormatUnknown, match="got 'toy'"):
        find_format("toy")
    install(site, {"toy": "tests.contract.executors.toy_format:TOY"})
    assert find_format("toy") is TOY
    with pytest.raises(FormatUnknown, match="got 'other'; accepted: exported_program, aoti, neff, toy"):
        find_format("other")


def test_ours_are_not_replaced(site: Path) -> None:
    install(site, {"aoti": "tests.contract.executors.toy_format:TOY"})
    assert find_format("aoti") is CPU.lowerings[1].format


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("toy", "tests.targets.nothing:TOY", "cannot be loaded: ModuleNotFoundError"),
        ("toy", "tests.contract.executors.toy_format:NOTHING", "cannot be loaded: AttributeError"),
        ("toy", "tests.contract.executors.toy_format:NO_FORMAT", "is a str, not an ExecutableFormat"),
        ("game", "tests.contract.executors.toy_format:TOY", "is the format toy"),
    ],
)
def test_entry_points_that_give_no_format(site: Path, name: str, value: str, message: str) -> None:
    install(site, {name: value})
    with pytest.raises(FormatInvalid, match=f"executable format {name}: entry point {value} {message}"):
        find_format(name)


def test_two_distributions_with_the_same_format(site: Path) -> None:
    install(site, {"toy": "tests.contract.executors.toy_format:TOY"})
    install(site, {"toy": "tests.contract.executors.toy_format:NO_FORMAT"}, "kiln_other")
    with pytest.raises(FormatInvalid, match=r"NO_FORMAT and .*TOY both name the format"):
        find_format("toy")
