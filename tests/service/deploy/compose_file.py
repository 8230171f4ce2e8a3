"""docker-compose.yml as Docker Compose itself understands it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.repository import ROOT

COMPOSE = ROOT / "docker-compose.yml"
TLS = ROOT / "deploy" / "tls.yml"
PROGRAM = Path(sys.executable).with_name("docker-compose")
#: Without this host's own settings of the compose file.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KILN_")}


@cache
def resolve(*files: Path, **variables: str) -> dict[str, Any]:
    """Gives the merged, checked and interpolated model of compose files.

    Raises:
        CalledProcessError: Compose refuses them; `stderr` says why.
    """
    words = [word for file in files for word in ("--file", str(file))]
    command = [str(PROGRAM), *words, "config", "--format", "json"]
    output = subprocess.run(command, check=True, env=ENVIRONMENT | variables, capture_output=True, text=True).stdout
    model: dict[str, Any] = json.loads(output)
    return model


def seconds(duration: str) -> float:
    """Reads Compose's `1m30s`."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))
