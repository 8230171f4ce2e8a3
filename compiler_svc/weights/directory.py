"""Reads the small files of a checkpoint directory: by plain name, within the model roots, and bounded in size."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bundle.errors import FieldViolation
from bundle.host.reading import reading
from bundle.host.shortage import name_shortage
from compiler_svc.weights.errors import CheckpointInvalid

#: Of one JSON file or template. Those of the largest published models have less than 16 MiB.
MAX_TEXT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class CheckpointDirectory:
    """Files of one directory; symbolic links may not lead out of `roots`, which are resolved; no roots allow any."""

    path: Path
    roots: tuple[Path, ...]

    def has(self, name: str) -> bool:
        """Whether the directory has a file of that name."""
        return (self.path / name).is_file()

    def list_names(self, folder: str = "") -> list[str]:
        """Lists what is in the directory, or in a folder of it, sorted."""
        with reading(lambda detail: CheckpointInvalid(self.path, folder or ".", detail, "a readable directory")):
            return sorted(path.name for path in (self.path / folder).iterdir())

    def file(self, name: str) -> Path:
        """The path of a file."""
        return self.files([name])[name]

    def files(self, names: Iterable[str]) -> dict[str, Path]:
        """The paths of files, by name."""
        files = {name: self.path / name for name in names}
        violations = [
            FieldViolation(name, "no such file", "a file of the checkpoint directory")
            if not file.is_file()
            else FieldViolation(name, "a link out of the model roots", "a file within the model roots")
            for name, file in files.items()
            if not file.is_file() or not self._holds(file)
        ]
        if violations:
            raise CheckpointInvalid.listing(self.path, violations)
        return files

    def small_file(self, name: str) -> Path:
        """The path of a file that may be read at once."""
        file = self.file(name)
        if (size_bytes := file.stat().st_size) > MAX_TEXT_BYTES:
            raise CheckpointInvalid(self.path, name, f"{size_bytes} bytes", f"a file of at most {MAX_TEXT_BYTES} bytes")
        return file

    def read_text(self, name: str) -> str:
        """Reads a UTF-8 file."""
        try:
            return self.small_file(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            invalid = CheckpointInvalid(self.path, name, str(error), "a readable UTF-8 file")
            raise name_shortage(error) or invalid from error

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads a file that holds one JSON object."""
        try:
            value = json.loads(self.read_text(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointInvalid(self.path, name, f"text that is no JSON ({error})", "a JSON object") from error
        if not isinstance(value, dict):
            raise CheckpointInvalid(self.path, name, f"a JSON {type(value).__name__}", "a JSON object")
        return value

    def read_optional_json(self, name: str) -> dict[str, Any]:
        """Reads a JSON object; an empty one if the file does not exist."""
        return self.read_json(name) if self.has(name) else {}

    def _holds(self, file: Path) -> bool:
        return not self.roots or any(Path(os.path.realpath(file)).is_relative_to(root) for root in self.roots)
