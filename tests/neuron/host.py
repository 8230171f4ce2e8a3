"""Fixtures: a host with NeuronCores that the stand-in for libnrt pretends to be."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from execution.ranks.forkservers import RankForkservers
from tests.neuron.stand_in import LIBRARY, build_stand_in, make_environment
from tests.neuron.toys import make_neuron_toy
from tests.ranks.toy import ToyBundle


@pytest.fixture(scope="session")
def nrt_library(run_directory: Path) -> Path:
    """The stand-in, built once a run by the first worker that needs it."""
    directory = run_directory / "libnrt"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return directory / LIBRARY if (directory / LIBRARY).exists() else build_stand_in(directory)


@pytest.fixture(scope="session")
def neuron_process(nrt_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Makes this process one on a host of two cores, with the first one visible; returns the host's directory.

    libnrt is a process's for good, so that all tests of a worker share it.
    """
    directory = tmp_path_factory.mktemp("neuron-host")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in make_environment(nrt_library, directory).items():
            patch.setenv(name, value)
        # The loader knows the library by its name from here on.
        ctypes.CDLL(str(nrt_library))
        yield directory


class Faults:
    """What calls of libnrt do instead of what they should, in all processes of a host."""

    def __init__(self, path: Path) -> None:
        """Takes the file that the stand-in reads at each call."""
        self._path = path

    def set(self, call: str, what: object) -> None:
        """Gives a call one fault in place of all that were set: a status, or `wait PATH`."""
        self._path.write_text(f"{call} {what}\n")

    def clear(self) -> None:
        """Takes all faults back."""
        self._path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def neuron_host(nrt_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """Makes what this process starts processes of a host of two cores; returns the faults of their calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in make_environment(nrt_library, tmp_path_factory.mktemp("host")).items():
            patch.setenv(name, value)
        yield Faults(Path(os.environ["NEURON_STAND_IN_FAULTS"]))


@pytest.fixture(scope="module")
def neuron_forkservers(neuron_host: Faults) -> Iterator[RankForkservers]:
    """Forkservers that know the host."""
    with RankForkservers() as forkservers:
        yield forkservers


@pytest.fixture
def faults(neuron_process: Path) -> Iterator[Faults]:
    """Faults of this process's calls."""
    faults = Faults(Path(os.environ["NEURON_STAND_IN_FAULTS"]))
    yield faults
    faults.clear()


@pytest.fixture(scope="session")
def neuron_toy(tmp_path_factory: pytest.TempPathFactory) -> ToyBundle:
    """The toy as a bundle of NEFFs."""
    return make_neuron_toy(tmp_path_factory.mktemp("neuron-toy") / "bundle")


@pytest.fixture(scope="session")
def neuron_pair(tmp_path_factory: pytest.TempPathFactory) -> ToyBundle:
    """The toy as a bundle of NEFFs for two ranks, which exchange tensors."""
    return make_neuron_toy(tmp_path_factory.mktemp("neuron-pair") / "bundle", 2)
