"""`python -m execution.executors.neuron.inspection WHAT TARGET`: the driver, the library or the cores of this host.

Each core is tried in a process of its own, which has it until it ends. What this prints, `targets.finding` says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bundle.errors import KilnError
from bundle.host.environment import inherit
from bundle.manifest import Target
from execution.device_errors import DeviceBusy, DeviceCallFailed, DeviceUnsuitable, NeuronLibraryMissing
from execution.executors.neuron.device import LOGICAL_CORE_SIZE, VISIBLE_CORES, open_device
from execution.executors.neuron.host import count_cores
from execution.executors.neuron.initialization import Initialization
from execution.executors.neuron.library import LIBRARIES, STATUS_CALLS, VOID_CALLS, find_library, read_version
from execution.visible_cores import list_visible, number_on_host
from targets.finding import Finding, print_finding, print_progress
from targets.neuron import DRIVER_PACKAGE, LIBRARY_PACKAGES, NEFF
from targets.neuron_releases import RUNTIME_PACKAGE, list_faults
from targets.registry import TARGETS

_SHOW_CORES: Final = "neuron-ls"
#: A host has up to 128 cores, which are tried one after the other.
_INITIALIZATION: Final = Initialization(retry_for_s=1.0)
_READ_KERNEL_LOG: Final = "sudo dmesg | grep -i neuron | tail"


def inspect_driver(root: Path) -> Finding:
    """Looks for the device files, and for the kernel module that makes them."""
    files = sorted(root.glob("dev/neuron[0-9]*"))
    module = root / "sys/module/neuron"
    version_file = module / "version"
    version = version_file.read_text().strip() if version_file.exists() else None
    details = {"devices": [f"/{file.relative_to(root)}" for file in files], "driver": version}
    if not files and not module.exists():
        advice = f"{_install(DRIVER_PACKAGE)} linux-headers-$(uname -r) && sudo modprobe neuron"
        summary = "no device file /dev/neuron*, and the kernel module neuron is not loaded"
        return Finding(ok=False, summary=summary, advice=advice, details=details)
    if not files:
        summary = "the kernel module neuron is loaded, but there is no device file /dev/neuron*"
        advice = (
            "use an inf2, trn1, trn2 or trn3 instance; give a container its devices: docker run --device=/dev/neuron0"
        )
        return Finding(ok=False, summary=summary, advice=advice, details=details)
    locked = [f"/{file.relative_to(root)}" for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if locked:
        summary = f"this user may not read and write {', '.join(locked)}"
        return Finding(ok=False, summary=summary, advice=f"ls -l {' '.join(locked)}", details=details)
    counted = f"{len(files)} device{'s' if len(files) > 1 else ''}"
    return Finding(ok=True, summary=f"{counted}, driver {version or 'of unknown version'}", details=details)


def inspect_library() -> Finding:
    """Loads libnrt and looks for every call that a rank makes."""
    try:
        library = find_library()
    except NeuronLibraryMissing:
        summary = f"{LIBRARIES[0]} is neither where the loader looks nor in {Path(LIBRARIES[1]).parent}"
        return Finding(ok=False, summary=summary, advice=_install(*LIBRARY_PACKAGES))
    version = read_version(library)
    names = (*STATUS_CALLS, *VOID_CALLS)
    missing = [name for name in names if not hasattr(library, name)]
    details = {"version": version, "missing": missing}
    described = f"libnrt {version or 'of unknown version'}"
    if missing:
        summary = f"{described} has no {', '.join(missing)}"
        return Finding(ok=False, summary=summary, advice=_install(*LIBRARY_PACKAGES), details=details)
    faults = list_faults(RUNTIME_PACKAGE, version) if version else []
    summary = "; ".join([f"{described} with all {len(names)} calls that Kiln makes", *faults])
    return Finding(ok=True, summary=summary, details=details)


def inspect_cores(target: Target) -> Finding:
    """Counts the logical cores, and takes each one for a moment."""
    # libnrt counts logical cores of this size.
    os.environ[LOGICAL_CORE_SIZE] = str(target.lnc)
    try:
        total = count_cores()
        visible = list_visible(NEFF)
    except NeuronLibraryMissing as error:
        return Finding(ok=False, summary=str(error), advice=_install(*LIBRARY_PACKAGES))
    except (DeviceCallFailed, DeviceUnsuitable) as error:
        return Finding(ok=False, summary=str(error), advice=_SHOW_CORES)
    total = len(visible) or total
    tried = []
    for core in range(total):
        print_progress(f"core {core} of {total}")
        tried.append(_try_core(core, target))
    free = [core for core, one in enumerate(tried) if one["state"] == "free"]
    busy = [core for core, one in enumerate(tried) if one["state"] == "busy"]
    failed = {core: one for core, one in enumerate(tried) if one["state"] == "failed"}
    details = {"total": total, "lnc": target.lnc, "free": free, "busy": busy, "failed": failed}
    counted = f"{total} logical cores of {target.lnc} physical each (LNC {target.lnc}), {len(free)} free"
    if failed:
        core, one = next(iter(failed.items()))
        summary = f"{counted}; core {core}: {one['message']}"
        return Finding(ok=False, summary=summary, advice=one["advice"], details=details)
    if not free:
        summary = counted if total else "libnrt sees no core"
        return Finding(ok=False, summary=summary, advice=f"end what {_SHOW_CORES} shows on them", details=details)
    known = [int(tried[core]["free_bytes"]) for core in free if tried[core]["free_bytes"] is not None]
    if not known:
        return Finding(ok=True, summary=f"{counted}, of unknown memory", details=details)
    details = details | {"free_bytes": min(known)}
    return Finding(ok=True, summary=f"{counted}, {min(known) / (1 << 30):.1f} GiB each", details=details)


def try_core(target: Target) -> Mapping[str, object]:
    """Takes the one core that this process sees, until the process ends."""
    try:
        return {"state": "free", "free_bytes": open_device(target, _INITIALIZATION).free_bytes}
    except DeviceBusy as error:
        return {"state": "busy", "message": str(error)}
    except DeviceUnsuitable as error:
        (violation,) = error.violations
        advice = f"kiln doctor --target {violation.accepted}" if violation.accepted in TARGETS else _SHOW_CORES
        return {"state": "failed", "message": str(violation), "advice": advice}
    except KilnError as error:
        return {"state": "failed", "message": str(error), "advice": _READ_KERNEL_LOG}


def _try_core(core: int, target: Target) -> Mapping[str, Any]:
    command = [sys.executable, "-m", __spec__.name, "core", target.kind]
    environment = inherit("rank") | {VISIBLE_CORES: str(*number_on_host(NEFF, (core,)))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        last = ended.stderr.strip().splitlines()[-1:]
        message = f"exit code {ended.returncode}: {' '.join(last)}".strip(": ")
        return {"state": "failed", "message": message, "advice": _READ_KERNEL_LOG}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _install(*packages: tuple[str, str]) -> str:
    """The command that installs packages at their versions, which go on with a hash."""
    return " ".join(["sudo apt-get install --yes", *(f'"{name}={version}*"' for name, version in packages)])


def main() -> None:
    """Prints what the first argument names."""
    kinds = [target.kind for target in TARGETS.values() if target.core_bytes is not None]
    parser = argparse.ArgumentParser(prog="inspection")
    parser.add_argument("what", choices=("driver", "library", "cores", "core"))
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--root", type=Path, default=Path("/"), help="directory that stands for /")
    options = parser.parse_args()
    size = os.environ.get(LOGICAL_CORE_SIZE, "")
    lnc = int(size) if size.isdigit() else TARGETS[options.kind].logical_core_size
    target = Target(kind=options.kind, isa="", lnc=lnc)
    match options.what:
        case "driver":
            print_finding(inspect_driver(options.root))
        case "library":
            print_finding(inspect_library())
        case "cores":
            print_finding(inspect_cores(target))
        case _:
            sys.stdout.write(f"{json.dumps(try_core(target))}\n")


if __name__ == "__main__":
    main()
