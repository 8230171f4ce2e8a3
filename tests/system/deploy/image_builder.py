"""Carries out our Dockerfiles without a container engine: each stage is a directory that stands for `/`.

Strict: an instruction or a form that it does not know is an error. What only root can do in a real image (packages of
the system, users) is recorded; what makes the virtual environment is done, by the interpreter that runs the tests.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dockerfile

from tests.service.deploy.build_context import BuildContext

_ABSOLUTE = re.compile(r"""(?<![^\s"'=])/(?=\w)""")
_OURS = re.compile(r"/(opt/kiln|src|wheels|var/lib/kiln)\b")
_RECORDED = ("apt-get", "useradd")


class InstructionUnsupported(ValueError):
    """An instruction of a Dockerfile that this builder does not carry out."""

    def __init__(self, instruction: dockerfile.Command) -> None:
        super().__init__(f"line {instruction.start_line}: {instruction.original}")


@dataclass
class Stage:
    """A stage while it is built, and the image that the last one is.

    Attributes:
        root: Directory that stands for `/`.
        environment: What ENV set.
        arguments: What ARG declared.
        recorded: Commands that only root could have carried out.
        user: What USER set.
        workdir: What WORKDIR set.
        ports: What EXPOSE named.
        entrypoint: The image's entrypoint.
        command: The image's default arguments.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    recorded: list[str] = field(default_factory=list)
    user: str = "root"
    workdir: str = "/"
    ports: list[int] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def path(self, absolute: str) -> Path:
        """Gives the place of a path of the image."""
        return self.root / absolute.lstrip("/")


class ImageBuilder:
    """Builds the images of Dockerfiles; equal first instructions are carried out once, as an engine's cache does."""

    def __init__(self, context: BuildContext, scratch: Path) -> None:
        self._context = context
        self._scratch = scratch

    def build(self, paths: Iterable[Path]) -> dict[str, Stage]:
        """Builds each Dockerfile; gives their images by file name.

        Raises:
            InstructionUnsupported: A Dockerfile holds something new.
            CalledProcessError: A RUN failed.
        """
        files = {path.name: dockerfile.parse_file(str(path)) for path in paths}
        shared = Counter(key for instructions in files.values() for key in self._keys(instructions))
        return {name: self._build(name, instructions, shared) for name, instructions in files.items()}

    def _build(self, name: str, instructions: Sequence[dockerfile.Command], shared: Counter[str]) -> Stage:
        stages: dict[str, Stage] = {}
        stage = Stage(self._scratch)
        keys = self._keys(instructions)
        for index, (instruction, key) in enumerate(zip(instructions, keys, strict=True)):
            snapshot = self._scratch / "layers" / key
            if instruction.cmd == "FROM":
                if instruction.value[0] != "${PYTHON_IMAGE}":
                    raise InstructionUnsupported(instruction)
                stage_name = instruction.value[-1] if "AS" in instruction.value else "final"
                stage = stages[stage_name] = Stage(self._scratch / name / stage_name)
                stage.root.mkdir(parents=True)
            elif snapshot.exists():
                self._apply(stage, stages, instruction, is_cached=True)
                stage.root.rmdir()
                _link_tree(snapshot, stage.root)
            else:
                is_cached = any((self._scratch / "layers" / later).exists() for later in keys[index + 1 :])
                self._apply(stage, stages, instruction, is_cached=is_cached)
                is_last_shared = shared[key] > 1 and shared[keys[index + 1]] == 1
                if is_last_shared and not is_cached:
                    _link_tree(stage.root, snapshot)
        return stage

    def _keys(self, instructions: Sequence[dockerfile.Command]) -> list[str]:
        """Gives a key of the state after each instruction: of everything that led to it."""
        keys, key = [], ""
        for instruction in instructions:
            copied = ""
            if instruction.cmd == "COPY" and not instruction.flags:
                copied = self._context.digest(instruction.value[0])
            key = hashlib.sha256(f"{key}\0{instruction.original}\0{copied}".encode()).hexdigest()
            keys.append(key)
        return keys

    def _apply(
        self, stage: Stage, stages: dict[str, Stage], instruction: dockerfile.Command, *, is_cached: bool
    ) -> None:
        value = instruction.value
        match instruction.cmd:
            case "ARG":
                (declaration,) = value
                argument, _, default = declaration.partition("=")
                stage.arguments[argument] = default
            case "RUN":
                self._run(stage, instruction, is_cached=is_cached)
            case "COPY":
                self._copy(stage, stages, instruction, is_cached=is_cached)
            case "ENV":
                stage.environment |= dict(zip(value[::2], value[1::2], strict=True))
            case "USER":
                (stage.user,) = value
            case "WORKDIR":
                (stage.workdir,) = value
                stage.path(stage.workdir).mkdir(parents=True, exist_ok=True)
            case "EXPOSE":
                stage.ports += map(int, value)
            case "ENTRYPOINT" if instruction.json:
                stage.entrypoint = [*value]
            case "CMD" if instruction.json:
                stage.command = [*value]
            case _:
                raise InstructionUnsupported(instruction)

    def _copy(
        self, stage: Stage, stages: dict[str, Stage], instruction: dockerfile.Command, *, is_cached: bool
    ) -> None:
        source, destination = instruction.value
        match instruction.flags:
            case ():
                if not is_cached:
                    self._context.copy(source, stage.path(destination))
            case (flag,) if flag.startswith("--from="):
                _link_tree(stages[flag.removeprefix("--from=")].path(source), stage.path(destination))
            case _:
                raise InstructionUnsupported(instruction)

    def _run(self, stage: Stage, instruction: dockerfile.Command, *, is_cached: bool) -> None:
        if instruction.json or any(not flag.startswith("--mount=type=cache,") for flag in instruction.flags):
            raise InstructionUnsupported(instruction)
        (script,) = instruction.value
        words = shlex.split(script)
        match words:
            case [program, *_] if program in _RECORDED:
                stage.recorded.append(script)
            case ["install", "--directory", "--mode", mode, "--owner", _, "--group", _, *directories]:
                stage.recorded.append(script)
                for directory in directories:
                    stage.path(directory).mkdir(int(mode, 8), parents=True, exist_ok=True)
            case [("python" | "/opt/kiln/bin/python" | "ls" | "sh"), *_]:
                if not is_cached:
                    self._execute(stage, instruction, script)
            case _:
                raise InstructionUnsupported(instruction)

    def _execute(self, stage: Stage, instruction: dockerfile.Command, script: str) -> None:
        places = [match.start() for match in _ABSOLUTE.finditer(script)]
        if not all(_OURS.match(script, place) for place in places):
            raise InstructionUnsupported(instruction)
        moved = _ABSOLUTE.sub(f"{stage.root}/", script)
        # The environment says where packages come from, as in a real build.
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        python_folder = str(Path(sys._base_executable).parent)  # type: ignore[attr-defined]
        # Bytecode for thousands of modules takes half of the time, and would be used once ("0" means yes here).
        settings = {"PATH": f"{python_folder}:/usr/bin:/bin", "PIP_NO_COMPILE": "0"}
        environment = inherited | stage.arguments | stage.environment | settings
        subprocess.run(["/bin/sh", "-c", moved], check=True, env=environment, cwd=stage.root, stdout=subprocess.DEVNULL)


def _link_tree(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", "--link", str(source), str(destination)], check=True)
