"""The checks of each target, as rows, and their order: a check runs if those that it needs are ok."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kiln.compiler.v1.compiler_pb2 import Target

from kiln_client.doctor.probe import Finding, OnProgress, run_probe
from kiln_client.doctor.trial import CPU, OneLayerTrial
from kiln_client.enums import enum_names
from kiln_client.errors import KilnError
from kiln_client.stack.service_process import Service

#: Where the driver's files are looked for.
HOST_ROOT: Final = Path("/")

_TOOLS: Final = Service("tools of compiling", "targets.inspection", "kiln-targets")
_DEVICES: Final = Service("devices", "execution.executors.neuron.inspection", "kiln-execution")


@dataclass(frozen=True, slots=True)
class Examination:
    """What the checks of one run share.

    `environment` is added to that of processes that look; `host_root` stands for `/` where they look for the driver.
    """

    target: str
    environment: Mapping[str, str]
    trial: OneLayerTrial
    host_root: Path


Run = Callable[[Examination, Mapping[str, Finding], OnProgress], Awaitable[Finding]]
"""Runs a check. Takes what earlier checks found, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        needs: Names of the checks without which it cannot succeed.
        limit_s: Seconds after which it has failed.
        has_logs: Whether services write logs while it runs.
        needs_device: Whether a host without a device cannot pass it.
    """

    name: str
    needs: tuple[str, ...] = ()
    limit_s: float
    run: Run
    has_logs: bool = False
    needs_device: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check that has ended, or did not run."""

    name: str
    finding: Finding
    duration_s: float


def _probe(service: Service, *words: str) -> Run:
    async def run(examination: Examination, _: Mapping[str, Finding], on_progress: OnProgress) -> Finding:
        return await run_probe(service, [*words, examination.target], on_progress, examination.environment)

    return run


async def _look_for_driver(examination: Examination, _: Mapping[str, Finding], on_progress: OnProgress) -> Finding:
    words = ["driver", examination.target, "--root", str(examination.host_root)]
    return await run_probe(_DEVICES, words, on_progress, examination.environment)


async def _compile(examination: Examination, _: Mapping[str, Finding], on_progress: OnProgress) -> Finding:
    return await examination.trial.compile(on_progress)


async def _step(examination: Examination, earlier: Mapping[str, Finding], on_progress: OnProgress) -> Finding:
    cores = earlier["cores"].details["free"] if "cores" in earlier else [0]
    return await examination.trial.step(on_progress, cores[0])


_CPU_CHECKS: Final = (
    Check(name="tools", limit_s=60, run=_probe(_TOOLS)),
    Check(name="compile", needs=("tools",), limit_s=600, run=_compile, has_logs=True),
    Check(name="step", needs=("compile",), limit_s=300, run=_step, has_logs=True),
)
_NEURON_CHECKS: Final = (
    Check(name="driver", limit_s=30, run=_look_for_driver, needs_device=True),
    Check(name="library", limit_s=60, run=_probe(_DEVICES, "library"), needs_device=True),
    # Each core is initialized once.
    Check(name="cores", needs=("driver", "library"), limit_s=180, run=_probe(_DEVICES, "cores"), needs_device=True),
    Check(name="packages", limit_s=120, run=_probe(_TOOLS)),
    Check(name="compile", needs=("packages",), limit_s=900, run=_compile, has_logs=True),
    Check(name="step", needs=("cores", "compile"), limit_s=300, run=_step, has_logs=True, needs_device=True),
)
#: By target. All but cpu are Neuron's.
CHECKS: Final[Mapping[str, Sequence[Check]]] = MappingProxyType(
    dict.fromkeys(enum_names(Target.Kind.DESCRIPTOR), _NEURON_CHECKS) | {CPU: _CPU_CHECKS}
)


def choose_checks(target: str, names: Collection[str], *, compile_only: bool = False) -> list[Check]:
    """Returns the named checks of a target and all that they need, in their order; every check for no name.

    `compile_only` leaves out what a host without a device cannot pass.
    """
    checks = {check.name: check for check in CHECKS[target]}
    chosen: set[str] = set()
    wanted = [*(names or checks)]
    while wanted:
        name = wanted.pop()
        chosen.add(name)
        wanted += checks[name].needs
    return [check for check in checks.values() if check.name in chosen and not (compile_only and check.needs_device)]


async def examine(
    examination: Examination, checks: Sequence[Check], on_start: Callable[[Check], None], on_progress: OnProgress
) -> AsyncIterator[Outcome]:
    """Runs checks one after the other, and yields each when it has ended.

    `on_start` is called when a check begins to run, `on_progress` with what it does now.
    """
    findings: dict[str, Finding] = {}
    for check in checks:
        begun = time.monotonic()
        lacking = [name for name in check.needs if findings[name].status != "ok"]
        if lacking:
            finding = Finding(status="not_run", summary=f"needs {' and '.join(lacking)}")
        else:
            on_start(check)
            finding = await _run_in_time(check, examination, findings, on_progress)
        findings[check.name] = finding
        yield Outcome(check.name, finding, time.monotonic() - begun)


async def _run_in_time(
    check: Check, examination: Examination, findings: Mapping[str, Finding], on_progress: OnProgress
) -> Finding:
    last = ""

    def report(text: str) -> None:
        nonlocal last
        last = text
        on_progress(text)

    try:
        async with asyncio.timeout(check.limit_s):
            return await check.run(examination, findings, report)
    except TimeoutError:
        at = f", at: {last}" if last else ""
        summary = f"did not end within {check.limit_s:g} s{at}"
        if check.has_logs:
            logs = f"{examination.trial.directory}/*.log"
            return Finding(status="failed", summary=summary, advice=f"less {logs}", details={"log": logs})
        advice = f"kiln doctor --target {examination.target} --check {check.name}"
        return Finding(status="failed", summary=summary, advice=advice)
    except KilnError as error:
        return Finding(status="failed", summary=error.message, advice="install what the message names")
