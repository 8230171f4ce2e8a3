"""A missing program is named with its package, and fails tests in CI instead of skipping them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import tools
from tests.repository import ROOT, list_tracked
from tests.tools import read_sources, require_tool

CI_RUN = ROOT / ".ci/run"
OTHER_LOOKUP = re.compile(r"shutil\.which\(|import which|importorskip|skipif")
NAMES = sorted(read_sources())

#: Stands for every program that .ci/run calls: it notes how it was called. Packages in $INSTALLED are installed. What
#: runs behind `make setup` is shown in tests/service/turns.
RECORDER = """#!/bin/sh
case "$(basename "$0")" in
  dpkg-query) for last; do :; done; case " $INSTALLED " in *" $last "*) printf installed;; *) exit 1;; esac;;
  id) echo "$USER_ID";;
  make) echo "make $* require=$KILN_REQUIRE_TOOLS" >> "$CALLS"; exit 9;;
  *) echo "$(basename "$0") $* require=$KILN_REQUIRE_TOOLS" >> "$CALLS";;
esac
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH, empty."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(tools, "POSTGRESQL", tmp_path / "postgresql")
    monkeypatch.setattr(tools, "PREFIX", tmp_path / "usr")
    return directory


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_missing_program_is_named_with_its_source(
    programs: Path, monkeypatch: pytest.MonkeyPatch, name: str, required: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("KILN_REQUIRE_TOOLS", required)
    with pytest.raises(outcome, match=re.escape(f"{name} is not installed: {read_sources()[name]}")):
        require_tool(name)


def test_older_program_counts_as_missing(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_REQUIRE_TOOLS", "1")
    node = write_program(programs / "node", "#!/bin/sh\necho v20.9.1\n")
    assert require_tool("node", oldest="20.9") == node
    with pytest.raises(pytest.fail.Exception, match=re.escape("node is v20.9.1, this test needs 20.10 or newer: ")):
        require_tool("node", oldest="20.10")


def test_newest_postgresql_is_found_off_the_path(programs: Path) -> None:
    found = [write_program(tools.POSTGRESQL / version / "bin/initdb", "") for version in ("9.6", "15")]
    assert require_tool("initdb") == found[-1]


def test_libraries_are_found_below_usr(programs: Path) -> None:
    jar = tools.PREFIX / "share/java/guava.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    assert require_tool("share/java/guava.jar") == jar


def test_sources_name_packages() -> None:
    sources = read_sources()
    assert sources["initdb"] == "Debian package postgresql"
    assert sources["node"].startswith("Node 20 ")


def test_tests_look_programs_up_in_one_place() -> None:
    # What makes the environment of `make test-xla` is no test, and skips none.
    here = {Path(tools.__file__), Path(__file__), ROOT / "tests/device/xla/environment.py"}
    files = [path for name in list_tracked("tests/*.py") if (path := ROOT / name) not in here]
    assert [path for path in files if OTHER_LOOKUP.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("missing", "user_id", "installed"),
    [(("postgresql", "skopeo"), 0, "postgresql skopeo"), ((), 1000, ""), (("skopeo",), 1000, None)],
    ids=["installs what is missing", "installs nothing twice", "says what root must install"],
)
def test_ci(tmp_path: Path, missing: tuple[str, ...], user_id: int, installed: str | None) -> None:
    """Runs .ci/run with recorders instead of the programs that it calls, up to the set-up, which fails."""
    for name in ("apt-get", "dpkg-query", "id", "make"):
        write_program(tmp_path / "recorders" / name, RECORDER)
    prefix, calls = "Debian package ", tmp_path / "calls"
    packages = {source.removeprefix(prefix) for source in read_sources().values() if source.startswith(prefix)}
    environment = {
        "PATH": f"{tmp_path / 'recorders'}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "INSTALLED": " ".join(packages - {*missing}),
        "USER_ID": str(user_id),
    }
    calls.touch()
    result = subprocess.run([CI_RUN], env=environment, capture_output=True, text=True, check=False, timeout=60)
    install = "apt-get install --yes --no-install-recommends"
    if installed is None:
        assert result.returncode != 0
        assert calls.read_text() == ""
        assert f"sudo apt-get update && sudo {install} {' '.join(missing)}\n" in result.stderr
        return
    assert result.returncode == 9, result.stderr
    installs = ["apt-get update require=", f"{install} {installed} require="] if installed else []
    assert calls.read_text().splitlines() == [*installs, "make setup require=1"]
