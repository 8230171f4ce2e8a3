"""Points of what a compiler does at which the matrix kills its processes: at each of them, something stands still."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from compiler_svc.builds.finished_shards import FOLDER as SHARDED
from tests.processes import name_of
from tests.system.kills.compiler_actions import RestartedCompiler

_POLL_INTERVAL_S = 0.001


@dataclass(frozen=True)
class Doing:
    """The moment before a process does something with a file, for the first time or a later one; it stands still.

    Attributes:
        what: What it does, for the row's name.
        pattern: See `Halt.order`.
    """

    what: str
    pattern: str
    ordinal: int = 1

    def order(self, compiler: RestartedCompiler) -> None:
        """Called before the action begins, or goes on."""
        compiler.halt.order(self.pattern, self.ordinal)

    async def wait(self, compiler: RestartedCompiler) -> None:
        while compiler.halt.find() is None:  # noqa: ASYNC110 - no process announces it
            await asyncio.sleep(_POLL_INTERVAL_S)

    def __str__(self) -> str:
        return f"{self.what} {self.ordinal}" if self.ordinal > 1 else self.what


@dataclass(frozen=True)
class Compiling:
    """The moment at which a C++ compiler runs; when one ends, another one of the lowering begins."""

    def order(self, compiler: RestartedCompiler) -> None:
        compiler.halt.withdraw()

    async def wait(self, compiler: RestartedCompiler) -> None:
        while not compiler.find("cc1plus"):  # noqa: ASYNC110 - none is announced
            await asyncio.sleep(_POLL_INTERVAL_S)

    def __str__(self) -> str:
        return "cc1plus runs"


@dataclass(frozen=True)
class Waiting:
    """The moment at which so many of neuronx-cc's double wait until they are killed."""

    num_waiting: int

    def order(self, compiler: RestartedCompiler) -> None:
        compiler.halt.withdraw()

    async def wait(self, compiler: RestartedCompiler) -> None:
        while compiler.neuron.count_waiting() < self.num_waiting:  # noqa: ASYNC110 - files announce no change
            await asyncio.sleep(_POLL_INTERVAL_S)

    def __str__(self) -> str:
        return f"{self.num_waiting} neuronx-cc wait"


@dataclass(frozen=True)
class Interpreting:
    """The moment at which a lowering for Neuron has begun another interpreter, which will wait for neuronx-cc."""

    def order(self, compiler: RestartedCompiler) -> None:
        compiler.halt.withdraw()

    async def wait(self, compiler: RestartedCompiler) -> None:
        while not {*map(name_of, compiler.running.lowerings())} - {"kiln-lowering", ""}:  # noqa: ASYNC110 - as above
            await asyncio.sleep(_POLL_INTERVAL_S)

    def __str__(self) -> str:
        return "an interpreter runs"


@dataclass(frozen=True)
class Before:
    """Before the action begins: the victim is idle."""

    def order(self, compiler: RestartedCompiler) -> None:
        compiler.halt.withdraw()

    async def wait(self, compiler: RestartedCompiler) -> None:
        """Has passed."""

    def __str__(self) -> str:
        return "idle"


Point = Doing | Compiling | Waiting | Interpreting | Before

_DIGEST = "[0-9a-f]{64}"


def list_lowered(home: Path) -> list[Path]:
    return list((home / "store" / "jobs").glob("*/lowered/*.json"))


def list_sharded(home: Path) -> list[Path]:
    return list((home / "store" / "jobs").glob(f"*/{SHARDED}/rank*.json"))


def begins(name: str, ordinal: int = 1) -> Doing:
    """A forked process has its name, and nothing else yet."""
    return Doing(f"{name} begins", f"^{name} ", ordinal)


def blob(ordinal: int) -> Doing:
    """It is whole, and gets its name."""
    return Doing("names blob", f"rename .*/blobs/sha256/{_DIGEST}$", ordinal)


def lowered(ordinal: int) -> Doing:
    return Doing("records a lowered executable", "rename .*/lowered/.*[.]json$", ordinal)


def sharded(ordinal: int) -> Doing:
    return Doing("records a finished shard", f"rename .*/{SHARDED}/rank[0-9]+[.]json$", ordinal)


def listed(ordinal: int) -> Doing:
    """1: the bundle. 2, 3: its golden result and its build record, with the list of its referrers. 4: its tag."""
    return Doing("replaces the index", "rename .*/store/index[.]json$", ordinal)


def removed(ordinal: int) -> Doing:
    return Doing("removes blob", f"remove .*/blobs/sha256/{_DIGEST}$", ordinal)


PREPARING = Doing("prepares a build's directory", "^(?!kiln-).* mkdir .*/jobs/[^/]+/sharded$")
EXPORTING = Doing("exports a graph", "^kiln-build write .*/work/[^/]+/program[.]pt2$")
STAGING = Doing("begins a blob", "write .*/staging/[^/]+$")
SHARDING = Doing("records the first shard", f"write .*/{SHARDED}/rank[0-9]+[.]new$")
RECORDING = Doing("records the first file", f"^kiln-build write .*/{SHARDED}/model[^/]*[.]new$")
PLACING = Doing("names the checkpoint", "^kiln-build rename .*/models/small-[0-9]+$")
#: transformers looks for the reference's files.
CHECKING = Doing("compares logits with the reference", "^kiln-build listdir .*/models/[^/]+/$")
UNPINNING = Doing("removes pins", "^kiln-build remove .*/pins/[^/]+$", 3)
CLEARING = Doing("clears the build's directory", "^(?!kiln-).* remove lock$")
TAGGING = Doing("tags the bundle", "^(?!kiln-).* rename .*/store/index[.]json$")
TRYING = Doing("tries the converted tokenizer", "^kiln-text putenv ", 2)
LOWERING = Doing("lowers", "^kiln-lowering mkdir .*/inductor$")
LOADING = Doing("loads an executable", "^kiln-rank-1 read .*/blobs/sha256/")
