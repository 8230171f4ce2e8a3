"""How many cores a runtime has, by a stand-in for the library of its target."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.errors import OptionsInvalid
from execution.device_errors import DeviceCallFailed, NeuronLibraryMissing
from execution.executors.neuron.library import STATUS_CALLS, VOID_CALLS
from runtime_svc.host_cores import settle_cores
from runtime_svc.settings import Settings, parse_settings
from tests.neuron.host import Faults, neuron_host, nrt_library
from tests.neuron.stand_in import LIBRARY

__all__ = ["neuron_host", "nrt_library"]

REQUIRED = ("--address=127.0.0.1:0", "--compiler=127.0.0.1:7001", "--cache=cache")


@pytest.fixture
def faults(neuron_host: Faults) -> Iterator[Faults]:
    yield neuron_host
    neuron_host.clear()


#: Of a host with three cores.
COUNTER = "int nrt_get_total_vnc_count(int *n) { *n = 3; return 0; }"


def build_library(directory: Path, *lines: str) -> None:
    """Builds another library than the stand-in, under its name. Its calls fail but for those that the lines define."""
    others = [name for name in (*STATUS_CALLS, *VOID_CALLS) if not any(f" {name}(" in line for line in lines)]
    source = directory / "library.c"
    calls = [*lines, *(f"int {name}(void) {{ return 1; }}" for name in others)]
    source.write_text("\n".join(["#include <stdlib.h>", *calls, ""]))
    command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(directory / LIBRARY)]
    subprocess.run(command, check=True)


async def settle(*arguments: str) -> Settings:
    return await settle_cores(parse_settings([*REQUIRED, *arguments], os.environ))


async def test_all_cores_of_the_host_unless_fewer_are_asked_for(faults: Faults) -> None:
    """The stand-in tells whose cores they are only once it has been initialized."""
    assert (await settle("--target=trn2")).num_cores == 2
    assert (await settle("--target=trn2", "--cores=1")).num_cores == 1


async def test_more_cores_than_the_host_has(faults: Faults) -> None:
    with pytest.raises(OptionsInvalid, match="cores: got 3; accepted: 1 to 2, the logical cores of this host"):
        await settle("--target=trn2", "--cores=3")


@pytest.mark.parametrize(("cores", "count"), [("24-31", 8), ("51,52", 2), ("7", 1), ("3-4,5", 3)])
async def test_cores_of_a_container(faults: Faults, monkeypatch: pytest.MonkeyPatch, *, cores: str, count: int) -> None:
    """AWS numbers them by the host, of which the container may have only these."""
    monkeypatch.setenv("NEURON_STAND_IN_CORES", "8")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
    assert (await settle("--target=trn2")).num_cores == count
    accepted = f"1 to {count}, the logical cores in NEURON_RT_VISIBLE_CORES"
    with pytest.raises(OptionsInvalid, match=f"cores: got {count + 1}; accepted: {accepted}"):
        await settle("--target=trn2", f"--cores={count + 1}")


async def test_more_cores_in_a_container_than_the_library_finds(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "24-31")
    with pytest.raises(OptionsInvalid, match="NEURON_RT_VISIBLE_CORES: got 24-31; accepted: at most 2 cores"):
        await settle("--target=trn2")


@pytest.mark.parametrize("cores", ["all", "1,", "-3", "5-4", "3,5", "52,51", "1,1"])
async def test_variable_that_names_no_cores(faults: Faults, monkeypatch: pytest.MonkeyPatch, cores: str) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
    accepted = "cores of this host, ascending and without a gap, such as 51,52 or 24-31"
    with pytest.raises(OptionsInvalid, match=f"NEURON_RT_VISIBLE_CORES: got {cores}; accepted: {accepted}"):
        await settle("--target=trn2")


async def test_cores_of_another_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a library that tells whose cores they are before it is initialized; 2 is trn1's family of instances."""
    build_library(tmp_path, COUNTER, "int nrt_get_instance_info(unsigned *info) { *info = 2; return 0; }")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(OptionsInvalid, match="target: got trn2; accepted: trn1, whose cores this host has"):
        await settle("--target=trn2")
    assert (await settle("--target=trn1")).num_cores == 3


@pytest.mark.parametrize("answer", ["*info = 99; return 0;", "abort();"], ids=["unknown family", "death"])
async def test_library_that_does_not_tell_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The first load asks again."""
    build_library(tmp_path, COUNTER, f"int nrt_get_instance_info(unsigned *info) {{ {answer} }}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert (await settle("--target=trn2")).num_cores == 3


async def test_host_without_cores(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_STAND_IN_CORES", "0")
    with pytest.raises(OptionsInvalid, match="target: got trn2; accepted: a target whose cores this host has"):
        await settle("--target=trn2")


async def test_host_without_the_library(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with pytest.raises(NeuronLibraryMissing, match="cannot be loaded: install aws-neuronx-runtime-lib"):
        await settle("--target=trn2")


async def test_library_that_cannot_tell(faults: Faults) -> None:
    faults.set("nrt_get_total_vnc_count", 1)
    with pytest.raises(DeviceCallFailed, match=r"nrt_get_total_vnc_count failed: NRT_FAILURE \(1\)"):
        await settle("--target=trn2")


async def test_library_that_kills_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_library(tmp_path, "__attribute__((constructor)) static void die(void) { abort(); }")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(DeviceCallFailed, match="its process ended with -6"):
        await settle("--target=trn2")


async def test_logical_cores_have_the_size_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library counts by the variable that the option stands for."""
    counter = 'int nrt_get_total_vnc_count(int *n) { *n = 8 / atoi(getenv("NEURON_LOGICAL_NC_CONFIG")); return 0; }'
    build_library(tmp_path, counter)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert (await settle("--target=trn2")).num_cores == 4
    assert (await settle("--target=trn2", "--logical-core-size=1")).num_cores == 8
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    settings = await settle("--target=trn2")
    assert (settings.num_cores, settings.logical_core_size) == (8, 1)


async def test_ranks_on_processors_ask_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert (await settle("--cores=300")).num_cores == 300
