"""The tools on which an executable's bytes depend besides its graph and options, and their versions."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from bundle.host.environment import inherit
from targets.errors import NeuronToolchainMissing, ToolchainMissing

#: Prints the version of Python and those of the distributions that the arguments name, null for those it lacks.
_PRINT_VERSIONS: Final = """
import json, platform, sys
from importlib import metadata
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""
_INTERPRETER_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Program:
    """A program on PATH that a lowering calls; `version_arguments` make it print only its version."""

    name: str
    version_arguments: tuple[str, ...]

    def find(self) -> Path:
        """Finds the path of the program."""
        path = shutil.which(self.name)
        if path is None:
            raise ToolchainMissing(self.name)
        return Path(path)

    def read_version(self) -> str:
        """Reads the version of the program."""
        command = [str(self.find()), *self.version_arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Choice(NamedTuple):
    """One of several ways to do something, which an environment variable names, and the way without it."""

    variable: str
    default: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Another Python, with distributions that cannot be installed beside this compiler's.

    Attributes:
        name: Prefix of its versions' names.
        variable: Environment variable with its path; without it, it is this Python.
        pins: The Python distributions that it needs, each with the version that Kiln was written for.
        choices: How it makes executables, where there are several ways, by what is chosen. They count as versions.
        entry_module: The module by which it makes executables; empty for one that needs no trial.
    """

    name: str
    variable: str
    pins: tuple[tuple[str, str], ...]
    choices: Mapping[str, Choice] = field(default_factory=dict)
    entry_module: str = ""

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names of the distributions."""
        return tuple(name for name, _ in self.pins)

    def find(self) -> str:
        """Returns its path."""
        return os.environ.get(self.variable) or sys.executable

    def read_choice(self, name: str) -> str:
        """Reads what was chosen."""
        choice = self.choices[name]
        return os.environ.get(choice.variable) or choice.default

    def make_environment(self) -> dict[str, str]:
        """Makes the environment in which it runs: it finds the scripts beside it first, as in an activated virtual
        environment, and no distributions but its own.
        """
        inherited = inherit("neuron interpreter")
        kept = {name: value for name, value in inherited.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        # Neuron's packages call scripts of theirs by name. The link to a base Python that `find` may return stays one:
        # the scripts are beside the link.
        scripts = str(Path(self.find()).absolute().parent)
        return kept | {"PATH": os.pathsep.join([scripts, inherited.get("PATH", os.defpath)])}

    def list_versions(self) -> Mapping[str, str | None]:
        """Reads the version of Python as `python`, and those of the distributions, None for those that it lacks."""
        path = self.find()
        return self._read_own_versions() if path == sys.executable else self._ask_versions(path)

    def read_versions(self) -> Mapping[str, str]:
        """Reads the version of Python, those of the distributions, and the choices, by name."""
        versions = dict(self.list_versions())
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            raise NeuronToolchainMissing(self.find(), ", ".join(missing))
        versions |= {name: self.read_choice(name) for name in self.choices}
        return {f"{self.name}.{name}": version for name, version in versions.items() if version is not None}

    def _read_own_versions(self) -> dict[str, str | None]:
        versions: dict[str, str | None] = {"python": platform.python_version()}
        for name in self.distributions:
            found = next(iter(metadata.Distribution.discover(name=name)), None)
            versions[name] = None if found is None else found.version
        return versions

    def _ask_versions(self, path: str) -> dict[str, str | None]:
        command = [path, "-c", _PRINT_VERSIONS, *self.distributions]
        try:
            printed = subprocess.run(
                command,
                env=self.make_environment(),
                capture_output=True,
                check=True,
                timeout=_INTERPRETER_TIMEOUT_S,
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise NeuronToolchainMissing(path, "Python that starts") from error
        versions: dict[str, str | None] = json.loads(printed)
        return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The tools that make executables, besides Python: distributions, programs on PATH, maybe another interpreter."""

    distributions: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()
    interpreter: Interpreter | None = None

    def read_versions(self) -> dict[str, str]:
        """Reads the versions by name, for cache keys and manifests."""
        return {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in self.distributions},
            **{program.name: program.read_version() for program in self.programs},
            **({} if self.interpreter is None else self.interpreter.read_versions()),
        }

    def require_programs(self) -> None:
        """Checks that every program and the other interpreter are installed."""
        for program in self.programs:
            program.find()
        if self.interpreter is not None:
            self.interpreter.read_versions()
