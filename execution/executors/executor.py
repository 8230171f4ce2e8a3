"""The interface of executors, which run a bundle's executables on one rank, and how to load one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from torch import Tensor

from bundle.manifest import Manifest
from execution.errors import ExecutableInvalid
from targets.registry import find_format


class Executor(Protocol):
    """The executables of one rank with their weights and state. Use it from one thread at a time."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in use, with those of mutable sets."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the KV cache."""

    def run(self, tag: str, inputs: Mapping[str, Tensor], *, with_old: bool = False) -> dict[str, Tensor]:
        """Runs one executable once.

        Args:
            inputs: The manifest's inputs, by name, contiguous.
            with_old: Compute with the weights that the last swap kept.

        Returns:
            The manifest's outputs, by name; new tensors.

        Raises:
            ExecutableUnknown: No executable has this tag.
            StepInvalid: The inputs are not the manifest's.
            StepFailed: The executable raised.
            WeightsAwaited: The bundle came without weights and none have been swapped in.
            WeightsNotStaged: There are no old weights.
        """

    def stage_weights(self, path: Path) -> None:
        """Maps other weights beside those in use. They replace any staged before, and old ones that a swap kept.

        Raises:
            WeightsInvalid: The file does not fit. The weights in use and those beside them stay.
        """

    def swap_weights(self, *, keeps_old: bool = False) -> None:
        """Puts the staged weights in use. Mutable sets keep what they hold.

        It releases the old weights, or, with `keeps_old`, leaves them staged: steps can run with them, and another swap
        puts them back in use.

        Raises:
            WeightsNotStaged: Nothing is staged.
        """

    def discard_staged(self) -> None:
        """Releases staged weights, or old ones that a swap kept, if any."""

    def check(self, weight_set: str, index: int, path: Path | None) -> None:
        """Checks whether `write` could write, as it does itself; changes nothing.

        Of the files that were checked or written last, as many stay mapped as the manifest's `max_host_adapters` says:
        another write of one of them reads no header and looks no tensor up, but copies.
        """

    def write(self, weight_set: str, index: int, path: Path | None) -> None:
        """Writes one entry of a mutable weight set: the part of each of its tensors at `index` of the first axis.

        Args:
            path: A safetensors file with the tensors of the set by their names, in their dtypes and in their shapes
                without the first axis; others in it are ignored. None zeroes the entry.

        Raises:
            WeightSetNotMutable: The bundle has no mutable weight set of this name.
            EntryUnknown: The set has no entry `index`.
            WeightsInvalid: The file does not fit. After each of these errors, the set holds what it held.
            DeviceCallFailed: The device's library failed; the entry may be half written.
        """

    def zero_state(self, slots: Sequence[int] | None) -> int:
        """Zeroes the given slots of the KV cache, or all of it for None; returns the bytes written.

        Raises:
            SlotUnknown: The KV cache does not have a given slot.
        """

    def commit_state(self) -> None:
        """Has the operating system commit the memory of the whole KV cache, so that no step waits for it.

        What the KV cache holds stays. It has no effect if the memory was committed at load.
        """

    def read_state(self, name: str) -> Tensor:
        """A copy of one state tensor, for tests."""

    def close(self) -> None:
        """Releases weights, state and executables."""


class LoadExecutor(Protocol):
    """The type of the function that an executable format names as its executor."""

    def __call__(
        self, manifest: Manifest, rank: int, blob_path: Callable[[str], Path], on_loaded: Callable[[str], None]
    ) -> Executor:
        """See `load_executor`, which first checks that all executables have the format."""


def preload(executable_format: str) -> None:
    """Imports what a format's first load would import: over a second for programs, almost none for libraries."""
    _find_loader(executable_format)
    for module in find_format(executable_format).preloaded:
        import_module(module)


def load_executor(
    manifest: Manifest,
    rank: int,
    blob_path: Callable[[str], Path],
    on_loaded: Callable[[str], None] = lambda _part: None,
) -> Executor:
    """Loads a rank's weights and executables, and allocates its state.

    `blob_path` gives the path of a verified blob by its digest. `on_loaded` is called with what has just been loaded:
    `weights` or an executable's tag.
    """
    first, *others = manifest.executables
    for other in others:
        if other.format != first.format:
            raise ExecutableInvalid(other.tag, f"it is {other.format} in a bundle of {first.format}")
    return _find_loader(first.format)(manifest, rank, blob_path, on_loaded)


def _find_loader(executable_format: str) -> LoadExecutor:
    """Finds the loader of a format. Imports only its module: to read exported programs, torch imports its compiler."""
    executor = find_format(executable_format).executor
    assert executor is not None, "a format that nothing runs is not found"
    loader: LoadExecutor = resolve_name(executor)
    return loader
