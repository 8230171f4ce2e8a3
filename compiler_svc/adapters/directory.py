"""Finds the files of an adapter, and reads its configuration if that needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bundle.digest import canonical_json, sha256_bytes
from bundle.errors import FieldViolation
from bundle.host.reading import reading
from compiler_svc.adapters.config import CONFIG_FILE, WEIGHT_FILES
from compiler_svc.adapters.errors import AdapterInvalid, AdapterNotFound
from compiler_svc.weights.directory import CheckpointDirectory
from compiler_svc.weights.errors import CheckpointInvalid

_ACCEPTED: Final = f"a directory of PEFT with {CONFIG_FILE} and {' or '.join(WEIGHT_FILES)}, or a .pt file of NxD"
_LASTING: Final = "files that can be read, and stay as they are"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter, whose path below its root is `name`, for errors.

    `config` is what PEFT's says; None if the file of the weights has it, as NxD's does.
    """

    name: Path
    weights: Path
    config: Mapping[str, Any] | None

    def digest(self, digest_file: Callable[[Path], str]) -> str:
        """Digests all that the adapter says, by the digests of its files."""
        files = (self.weights,) if self.config is None else (self.weights.with_name(CONFIG_FILE), self.weights)
        with reading_adapter(self.name):
            return sha256_bytes(canonical_json({file.name: digest_file(file) for file in files}))


@contextmanager
def reading_adapter(name: Path) -> Iterator[None]:
    """Names what is wrong with the files that the block reads as a mistake of the adapter."""
    with reading(lambda detail: AdapterInvalid(name, [FieldViolation(".", detail, _LASTING)])):
        try:
            yield
        except CheckpointInvalid as error:
            raise AdapterInvalid(name, error.violations) from error


def find_files(path: Path, *, roots: Sequence[Path] = (), field: str = "adapter") -> AdapterFiles:
    """Finds the files of an adapter without reading its weights; raises AdapterNotFound or AdapterInvalid.

    Args:
        path: A directory of PEFT, or a file of NxD's training.
        roots: Directories that must contain the files, after symbolic links are followed; empty allows any.
        field: What names the adapter, for errors.
    """
    resolved = tuple(root.resolve() for root in roots)
    name = next((path.relative_to(root) for root in resolved if path.is_relative_to(root)), path)
    with reading_adapter(name):
        if path.is_file():
            return AdapterFiles(name, CheckpointDirectory(path.parent, resolved).file(path.name), None)
        directory = CheckpointDirectory(path, resolved)
        weights = next((file for file in WEIGHT_FILES if directory.has(file)), None)
        if weights is None or not directory.has(CONFIG_FILE):
            detail = "has no weights" if directory.has(CONFIG_FILE) else f"has no {CONFIG_FILE}"
            raise AdapterNotFound(name, detail if path.is_dir() else "no such directory or file", _ACCEPTED, field)
        config = directory.read_json(CONFIG_FILE)
        return AdapterFiles(name, directory.file(weights), config)
