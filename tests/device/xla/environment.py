"""The environment of `make test-xla`: torch and torch-xla 2.9 without CUDA, in a virtual environment of their own.

The torch of the package index is built with CUDA. Its wheels of CUDA libraries, 3 GB, stay out: one library that we
compile here stands in for all of them. Each of its functions says that there is no device, so that torch computes on
the CPU.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import venv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
REQUIREMENTS: Final = HERE / "requirements.txt"
#: Versions of what it shares with `.venv`.
CONSTRAINTS: Final = HERE.parents[2] / "deploy/constraints.txt"
#: Installed without what they require, which would bring CUDA.
TORCH: Final = ("torch==2.9.0", "torch-xla==2.9.0")
TOOLS: Final = ("g++", "ldd", "nm")

#: Read by torch-xla when it is imported: which devices it has.
VARIABLES: Final = {"PJRT_DEVICE": "CPU"}

STAND_IN: Final = "libkiln_no_cuda.so"
#: cudaErrorNoDevice. Functions whose name ends so return a text instead.
NO_DEVICE: Final = 100
_RETURNS_TEXT: Final = re.compile(r"(ErrorString|ErrorName|ResultString)$")


class EnvironmentUnavailable(Exception):
    """The environment cannot be made on this machine.

    Attributes:
        reason: Why, for the person who runs the tests.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def make_environment(path: Path) -> Path:
    """Makes the environment unless it is there already, and current.

    Args:
        path: The directory that holds it, or will.

    Returns:
        Its Python.

    Raises:
        EnvironmentUnavailable: The platform, a tool or a package is missing.
    """
    python, marker = path / "bin/python", path / ".installed"
    state = hashlib.sha256(
        b"".join(file.read_bytes() for file in (Path(__file__), REQUIREMENTS, CONSTRAINTS))
    ).hexdigest()
    if marker.exists() and marker.read_text() == state:
        return python
    _check_platform()
    venv.create(path, with_pip=True)
    without_torch = path / "constraints.txt"
    # A requirement that came to require torch would bring CUDA: pip refuses instead.
    without_torch.write_text("torch<0\n")
    constrained = ("--constraint", CONSTRAINTS, "--constraint", without_torch)
    _install(python, "--requirement", REQUIREMENTS, *constrained)
    _install(python, "--no-deps", *TORCH)
    (libraries,) = path.glob("lib/python*/site-packages/torch/lib")
    replace_missing_libraries(libraries, python)
    _run([python, "-c", "import torch_xla; torch_xla.device()"], "torch-xla does not start", os.environ | VARIABLES)
    marker.write_text(state)
    return python


def _check_platform() -> None:
    found = f"{platform.system()} {platform.machine()} with Python {platform.python_version()}"
    if not re.fullmatch(r"Linux x86_64 with Python 3\.11\..*", found):
        raise EnvironmentUnavailable(f"torch-xla 2.9 is installed on Linux x86_64 with Python 3.11; this is {found}")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise EnvironmentUnavailable(f"{', '.join(missing)} not found; Debian's package g++ has what is needed")


def _install(python: Path, *arguments: str | Path) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments]
    _run(command, f"pip could not install {' '.join(map(str, arguments))}")


def _run(command: list[str | Path], failure: str, environment: Mapping[str, str] | None = None) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no output").splitlines()[-1]
        raise EnvironmentUnavailable(f"{failure}: {last}") from error


def replace_missing_libraries(folder: Path, python: Path) -> None:
    """Gives torch's libraries one library in the place of all that they need and do not find.

    Python opens extension modules with all their symbols resolved, so it defines every symbol that no other library
    has, under the version that torch asks for.

    Args:
        folder: Torch's libraries. They look for others beside themselves.
        python: The interpreter, whose own symbols torch uses.
    """
    for link in folder.iterdir():
        if link.is_symlink() or link.name == STAND_IN:
            link.unlink()
    own = [str(library) for library in folder.glob("*.so*")]
    listed = subprocess.run(["ldd", *own, python], check=True, capture_output=True, text=True).stdout
    missing = set(re.findall(r"(\S+) => not found", listed))
    found = set(re.findall(r"(/\S+) \(0x", listed)) | {str(python.resolve()), *own}
    defined = {name for name, _ in _list_symbols("--defined-only", found)}
    versions: dict[str, set[str]] = defaultdict(set)
    for name, version in _list_symbols("--undefined-only", own):
        if name not in defined:
            versions[version].add(name)
    source, script = folder / "no_cuda.c", folder / "no_cuda.map"
    source.write_text("".join(map(_render_function, sorted(set().union(*versions.values())))))
    script.write_text(
        "".join(f"{version} {{ {'; '.join(sorted(names))}; }};\n" for version, names in versions.items() if version)
    )
    library = folder / STAND_IN
    command = ["g++", "-x", "c", "-shared", "-fPIC", source, "-o", library, f"-Wl,--version-script={script}"]
    _run(command, "g++ could not compile what stands in for CUDA")
    for name in missing:
        (folder / name).symlink_to(STAND_IN)


def _list_symbols(kind: str, libraries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names and versions of dynamic symbols; the version is empty if a symbol has none. Weak needs are left out."""
    listed = subprocess.run(["nm", "-D", kind, *libraries], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        *_, kind_letter, symbol = ["", "", *line.split()]
        if kind_letter and kind_letter != "w":
            name, _, version = symbol.replace("@@", "@").partition("@")
            yield name, version


def _render_function(name: str) -> str:
    if _RETURNS_TEXT.search(name):
        return f'const char *{name}(void) {{ return "there is no CUDA"; }}\n'
    return f"int {name}(void) {{ return {NO_DEVICE}; }}\n"
