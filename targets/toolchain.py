"""Versions of everything that shapes an executable besides its graph and options."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from targets.errors import ToolchainMissing


@dataclass(frozen=True, slots=True)
class Program:
    """A program that a lowering calls.

    Attributes:
        name: As found on PATH.
        version_arguments: Arguments with which it prints its version and nothing else.
    """

    name: str
    version_arguments: tuple[str, ...]

    def find(self) -> Path:
        """Path of the program.

        Raises:
            ToolchainMissing: PATH has none.
        """
        path = shutil.which(self.name)
        if path is None:
            raise ToolchainMissing(self.name)
        return Path(path)

    def read_version(self) -> str:
        """Version of the program.

        Raises:
            ToolchainMissing: PATH has none.
        """
        command = [str(self.find()), *self.version_arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What executables are made with, Python aside.

    Attributes:
        distributions: Python distributions.
        programs: Programs on PATH.
    """

    distributions: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()

    def read_versions(self) -> dict[str, str]:
        """Versions by name, for cache keys and manifests.

        Raises:
            ToolchainMissing: A program is not installed.
        """
        return {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in self.distributions},
            **{program.name: program.read_version() for program in self.programs},
        }

    def require_programs(self) -> None:
        """Checks that every program is installed.

        Raises:
            ToolchainMissing: One is not.
        """
        for program in self.programs:
            program.find()
