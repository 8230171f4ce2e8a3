"""Settles how many logical cores this runtime has, by what its target's library says of the host."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from typing import Final

import msgspec

from bundle.errors import FieldViolation
from bundle.host.environment import inherit
from edge.errors import OptionsInvalid
from execution.device_errors import DeviceCallFailed, DeviceUnsuitable
from execution.failure import Failure
from execution.visible_cores import list_visible
from runtime_svc.settings import Settings
from targets.registry import TARGETS
from targets.target import ExecutableFormat

#: A driver that answers does so at once; one that hangs must not keep the runtime from saying so.
_ANSWER_TIMEOUT_S: Final = 60.0


async def settle_cores(settings: Settings) -> Settings:
    """Returns the settings with a number of cores that this host has: the one that was asked for, or all of them.

    A container may have some of the host's; see `execution.visible_cores`. Targets whose ranks compute on the host's
    processors keep theirs.
    """
    device = TARGETS[settings.target].lowerings[0].format
    if not device.core_counter:
        return settings
    total, kind = await _ask_library(device, settings.logical_core_size)
    if not total:
        accepted = "a target whose cores this host has: its library finds none, as without the driver"
        raise OptionsInvalid([FieldViolation("target", settings.target, accepted)])
    if kind not in (None, settings.target):
        raise OptionsInvalid([FieldViolation("target", settings.target, f"{kind}, whose cores this host has")])
    try:
        visible = list_visible(device)
    except DeviceUnsuitable as error:
        raise OptionsInvalid(list(error.violations)) from error
    if len(visible) > total:
        accepted = f"at most {total} cores, as many as the library finds"
        raise OptionsInvalid([FieldViolation(device.core_variable, os.environ[device.core_variable], accepted)])
    own = len(visible) or total
    if settings.num_cores > own:
        accepted = f"1 to {own}, the logical cores {f'in {device.core_variable}' if visible else 'of this host'}"
        raise OptionsInvalid([FieldViolation("cores", str(settings.num_cores), accepted)])
    return dataclasses.replace(settings, num_cores=settings.num_cores or own)


async def _ask_library(device: ExecutableFormat, logical_core_size: int) -> tuple[int, str | None]:
    """Counts the host's logical cores, and names their target if the library can tell before it takes one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", device.core_counter),
        env={**inherit("rank"), device.core_size_variable: str(logical_core_size)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _ANSWER_TIMEOUT_S)
        # The library may write to the same place before.
        answer = msgspec.json.decode(output.splitlines()[-1], type=tuple[int, str | None] | Failure)
    except TimeoutError as error:
        raise DeviceCallFailed(device.core_counter, f"no answer within {_ANSWER_TIMEOUT_S:g} s") from error
    except (IndexError, msgspec.DecodeError) as error:
        raise DeviceCallFailed(device.core_counter, f"its process ended with {process.returncode}") from error
    finally:
        if process.returncode is None:
            process.kill()
    if isinstance(answer, Failure):
        raise answer.to_error()
    return answer
