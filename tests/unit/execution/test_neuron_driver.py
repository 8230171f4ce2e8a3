"""What a host's files say of Neuron's driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from execution.executors.neuron import inspection
from execution.executors.neuron.inspection import inspect_driver


def add_module(root: Path, version: str | None) -> None:
    module = root / "sys/module/neuron"
    module.mkdir(parents=True)
    if version is not None:
        (module / "version").write_text(f"{version}\n")


def add_devices(root: Path, count: int) -> None:
    (root / "dev").mkdir()
    for number in range(count):
        (root / f"dev/neuron{number}").touch()
    (root / "dev/neuron-other").touch()


@pytest.mark.parametrize(
    ("count", "version", "summary"),
    [(1, "2.29.0.0", "1 device, driver 2.29.0.0"), (16, None, "16 devices, driver of unknown version")],
)
def test_devices_and_version(tmp_path: Path, count: int, version: str | None, summary: str) -> None:
    add_module(tmp_path, version)
    add_devices(tmp_path, count)
    found = inspect_driver(tmp_path)
    assert (found.ok, found.summary, found.advice) == (True, summary, "")
    assert found.details["driver"] == version
    assert len(found.details["devices"]) == count  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("has_module", "summary", "advice"),
    [
        (False, "", "modprobe neuron"),
        (True, "the kernel module neuron is loaded, but", "--device=/dev/neuron0"),
    ],
)
def test_a_host_without_devices(tmp_path: Path, has_module: bool, summary: str, advice: str) -> None:
    if has_module:
        add_module(tmp_path, "2.29.0.0")
    found = inspect_driver(tmp_path)
    assert (found.ok, found.summary.startswith(summary), advice in found.advice) == (False, True, True)


def test_devices_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_module(tmp_path, "2.29.0.0")
    add_devices(tmp_path, 2)
    # Root, who may run this, may read everything.
    monkeypatch.setattr(inspection.os, "access", lambda path, mode: path.name != "neuron1")
    found = inspect_driver(tmp_path)
    assert (found.ok, found.summary) == (False, "this user may not read and write /dev/neuron1")
    assert found.advice == "ls -l /dev/neuron1"
