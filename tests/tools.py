"""Programs and libraries that tests use: deploy/test-packages.txt lists them with the Debian package of each.

A test that needs a missing one skips and names the package. If KILN_REQUIRE_TOOLS is 1, as in CI, it fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.repository import ROOT

LIST = ROOT / "deploy/test-packages.txt"

#: Debian keeps a server's programs here, by version, and none of them on PATH.
POSTGRESQL = Path("/usr/lib/postgresql")

#: Paths of libraries in the list are below this.
PREFIX = Path("/usr")


def read_sources() -> dict[str, str]:
    """Program → the package or place that has it, as the end of a sentence."""
    rows = [line.split(maxsplit=2) for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return {name: rest[0] if package == "-" else f"Debian package {package}" for name, package, *rest in rows}


def require_tool(name: str, *, oldest: str = "") -> Path:
    """Path of a listed program or library.

    Skips the test if it is missing, or fails it if KILN_REQUIRE_TOOLS is 1.

    Args:
        oldest: The first version that will do, if any will not, such as "20.9".
    """
    source = read_sources()[name]
    servers = sorted(POSTGRESQL.glob("*/bin"), key=lambda path: parse_version(path.parent.name), reverse=True)
    if "/" in name:
        found = str(PREFIX / name) if (PREFIX / name).exists() else None
    else:
        found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, servers)]))
    if found is None:
        miss(f"{name} is not installed: {source}")
    if oldest:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        if parse_version(version) < parse_version(oldest):
            miss(f"{name} is {version}, this test needs {oldest} or newer: {source}")
    return Path(found)


def parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def miss(reason: str) -> NoReturn:
    if os.environ.get("KILN_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{reason} (KILN_REQUIRE_TOOLS is 1, so this test may not skip)", pytrace=False)
    pytest.skip(reason)
