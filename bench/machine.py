"""What a page says of the machine that its figures are of."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from targets.cpu import X86_64


def describe_machine() -> str:
    """Returns the processor, its instruction set, memory, kernel and Python of this host."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    instructions = (X86_64.list_supported() or ("no AVX2",))[-1]
    return (
        f"{model or platform.machine()}, {os.cpu_count()} cores, {instructions}, {memory_gib:.0f} GiB; "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )
