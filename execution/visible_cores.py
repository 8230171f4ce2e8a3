"""The cores of this host that a service may take, by the variable that its operator, or a container, has set.

AWS numbers them by the host: a container with the thirteenth device of four cores may take 48 to 51. A service counts
its cores from 0, and its ranks get the numbers of the host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

from execution.device_errors import DeviceUnsuitable
from targets.target import ExecutableFormat

_PART: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_ACCEPTED: Final = "cores of this host, ascending and without a gap, such as 51,52 or 24-31"


def list_visible(device: ExecutableFormat) -> tuple[int, ...]:
    """Lists the host's numbers of the cores that this process may take; empty if nothing limits it.

    Raises:
        DeviceUnsuitable: The variable has a value that names no cores.
    """
    value = os.environ.get(device.core_variable, "") if device.core_variable else ""
    if not value:
        return ()
    parts = [_PART.fullmatch(part.strip()) for part in value.split(",")]
    cores = [core for part in parts if part for core in range(int(part[1]), int(part[2] or part[1]) + 1)]
    if not all(parts) or not cores or cores != list(range(cores[0], cores[0] + len(cores))):
        raise DeviceUnsuitable(device.core_variable, value, _ACCEPTED)
    return tuple(cores)


def number_on_host(device: ExecutableFormat, cores: Sequence[int]) -> tuple[int, ...]:
    """Returns the host's numbers of a service's cores.

    Raises:
        DeviceUnsuitable: The service has fewer cores, or the variable names none.
    """
    visible = list_visible(device)
    if not visible:
        return tuple(cores)
    if any(core >= len(visible) for core in cores):
        accepted = f"0 to {len(visible) - 1}, the cores that {device.core_variable} gives"
        raise DeviceUnsuitable("cores", ", ".join(map(str, cores)), accepted)
    return tuple(visible[core] for core in cores)
