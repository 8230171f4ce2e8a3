"""Processes of a service that stand still before they touch a file, so that no death in the middle comes too late.

Each Python of the service imports `halt_site/sitecustomize.py`. That looks at what Python is about to do with files,
and stops its process before the event that is ordered here.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

#: Directory of distributions for the service.
SITE: Final = Path(__file__).parent / "halt_site"
#: Every process of the service inherits it, for its name begins with PYTHON.
VARIABLE: Final = "PYTHON_TEST_HALT"


class Halt:
    """At most one order at a time, for the processes whose variable names the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def order(self, pattern: str, ordinal: int = 1) -> None:
        """Lets the process stop that is about to do what is ordered; what was ordered before is forgotten.

        Args:
            pattern: Matches `NAME DOES PATH`: the name of the process; read, write, rename, remove, mkdir, listdir or
                putenv; and the path, or the number of a descriptor.
            ordinal: How often it has to be met, in whatever processes.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder / "order").symlink_to(f"{ordinal} {pattern}")

    def withdraw(self) -> None:
        """Lets no process stop any more, and the one go on that has."""
        if (halted := self.find()) is not None:
            with suppress(psutil.NoSuchProcess):
                halted.resume()
        shutil.rmtree(self.folder, ignore_errors=True)

    def find(self) -> psutil.Process | None:
        """The process that stands still by the last order, if there is one yet."""
        try:
            one = psutil.Process(int(str((self.folder / "halted").readlink())))
            return one if one.status() == psutil.STATUS_STOPPED else None
        except (FileNotFoundError, psutil.NoSuchProcess):
            return None
