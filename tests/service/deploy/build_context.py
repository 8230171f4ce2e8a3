"""The files that a build of an image may copy: the tree without what .dockerignore names."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


class BuildContext:
    """A directory seen through its .dockerignore, of whose patterns three forms are known: `*`, `!NAME`, `**/GLOB`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        lines = (line.strip() for line in (root / ".dockerignore").read_text().splitlines())
        patterns = [line for line in lines if line and not line.startswith("#")]
        if patterns[0] != "*":
            raise ValueError(
                f".dockerignore starts with {patterns[0]!r}; accepted: *, so that nothing comes along unnamed"
            )
        self._kept = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
        self._dropped = [pattern[3:] for pattern in patterns if pattern.startswith("**/")]
        understood = 1 + len(self._kept) + len(self._dropped)
        if understood != len(patterns) or any("/" in name for name in (*self._kept, *self._dropped)):
            raise ValueError(f".dockerignore: {patterns}; accepted: *, !NAME, **/GLOB")

    def copy(self, source: str, destination: Path) -> None:
        """Does what `COPY source destination` does: copies a file, or what is in a directory.

        Raises:
            FileNotFoundError: The source is not part of the context, or an empty directory.
        """
        copied = 0
        for path in self._files(source):
            target = destination / path.relative_to(self._root / source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
            copied += 1
        if not copied:
            raise FileNotFoundError(f"COPY {source}: no such file or directory in the build context")

    def digest(self, source: str) -> str:
        """Gives a digest of everything that `copy` would copy."""
        digest = hashlib.sha256()
        for path in sorted(self._files(source)):
            digest.update(f"{path.relative_to(self._root)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _files(self, source: str) -> Iterator[Path]:
        if PurePosixPath(source).parts[0] not in self._kept:
            return
        if (self._root / source).is_file():
            yield self._root / source
        for directory, names, files in os.walk(self._root / source):
            names[:] = [name for name in names if not self._is_dropped(name)]
            yield from (Path(directory, name) for name in files if not self._is_dropped(name))

    def _is_dropped(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._dropped)
