"""An interpreter that stands in for one with Neuron's packages: this one, with doubles of them on its path."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from targets.neuron import NEURON_PYTHON
from tests.repository import ROOT

SITE = ROOT / "tests/neuron/site"
#: Has the double of torch-xla, by which submodels run.
XLA_SITE = ROOT / "tests/neuron/xla_site"
VERSIONS = dict(NEURON_PYTHON.pins)
#: A script of Neuron's packages, which they call by name when they are imported.
SCRIPT = "libneuronpjrt-path"


def make_interpreter(directory: Path, versions: Mapping[str, str] = VERSIONS, *, has_xla: bool = False) -> Path:
    """Writes a program that runs this Python with the doubles, which claim to be of these versions. It does not start
    unless it finds a script that is beside it.

    Args:
        has_xla: Whether there is a double of torch-xla, too.
    """
    installed = directory / "installed"
    for name, version in versions.items():
        record = installed / f"{name.replace('-', '_')}-{version}.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = ":".join(map(str, (installed, SITE, *([XLA_SITE] if has_xla else []), ROOT)))
    program = _write_program(
        directory / "neuron-python",
        f"{SCRIPT} || exit",
        f'export PYTHONPATH="$PYTHONPATH:"{shlex.quote(path)}',
        f'exec {shlex.quote(sys.executable)} "$@"',
    )
    _write_program(directory / SCRIPT)
    return program


def _write_program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path
