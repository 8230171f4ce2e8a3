"""How the interpreter with Neuron's packages is started: with this compiler's own sources, and nothing beside them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from targets.neuron import NEURON_PYTHON

#: Packages of ours that the interpreter imports. It must not see the torch that may lie beside them.
_PACKAGES: Final = ("bundle", "targets", "execution", "compiler_svc")

#: What torch-xla reads when it is imported: its device is the host's processor, whatever plug-ins are installed.
XLA_ON_CPU: Final = {"PJRT_DEVICE": "CPU"}
#: The same: graphs are not functionalized, so that checks see what neuronx-cc gets. torch-neuronx has that default, and
#: operators differ; see `compiler_svc.lower.xla`.
AS_NEURON: Final = {"XLA_DISABLE_FUNCTIONALIZATION": "1"}
#: The same: graphs keep the lines that operations come from.
KEEPS_LINES: Final = {"XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1"}


def make_command(module: str, *arguments: str) -> list[str]:
    """Makes the command that runs one of our modules in the interpreter."""
    return [NEURON_PYTHON.find(), "-m", module, *arguments]


def make_environment(directory: Path) -> dict[str, str]:
    """Makes the interpreter's environment, in which it finds our packages by a folder of links in `directory`."""
    return NEURON_PYTHON.make_environment() | {
        **AS_NEURON,
        "PYTHONPATH": str(link_sources(directory / "sources")),
        # The sources may be another user's, or for another version of Python.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def link_sources(folder: Path) -> Path:
    """Makes a folder that has this installation's packages of ours and nothing else."""
    folder.mkdir(exist_ok=True)
    for name in _PACKAGES:
        spec = find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(Path(spec.origin).parent)
    return folder
