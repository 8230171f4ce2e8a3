"""The tools on which an executable's bytes depend besides its graph and options, and their versions."""

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
        name: Name of the program on PATH.
        version_arguments: Arguments that make it print only its version.
    """

    name: str
    version_arguments: tuple[str, ...]

    def find(self) -> Path:
        """Finds the path of the program.

        Raises:
            ToolchainMissing: PATH does not have it.
        """
        path = shutil.which(self.name)
        if path is None:
            raise ToolchainMissing(self.name)
        return Path(path)

    def read_version(self) -> str:
        """Reads the version of the program.

        Raises:
            ToolchainMissing: PATH does not have it.
        """
        command = [str(self.find()), *self.version_arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The tools that make executables, besides Python.

    Attributes:
        distributions: Python distributions.
        programs: Programs on PATH.
    """

    distributions: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()

    def read_versions(self) -> dict[str, str]:
        """Reads the versions by name, for cache keys and manifests.

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
            ToolchainMissing: A program is not installed.
        """
        for program in self.programs:
            program.find()
