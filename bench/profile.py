"""Where a step's time goes, by samples of `perf`, if the host has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.worker import Worker

#: What a library's samples are, whatever the function: some libraries have no symbols.
_LIBRARIES = (
    ("threads that wait at barriers (libgomp)", r"gomp|libiomp"),
    ("the interpreter and the calls", r"python"),
)
#: What a function of the compiled code or of torch is for; the first pattern that fits counts.
_KINDS = (
    ("attention", r"kiln::(attend|weigh|score|finish|multiply_(keys|block)|hide_branches|read_|write_|run_share)"),
    ("adapters (kiln::adapt)", r"kiln::(adapt|multiply_ranks|add_(outputs|square)|load_square)"),
    ("linear layers (kiln::linear)", r"kiln::|kiln_linear"),
    ("attention", r"flash_attention|scaled_dot|sgemv|sgemm|gemm|mkl_|softmax"),
    ("sorting for top-k", r"topk|sort|nth_element|introselect|_heap"),
    ("norms, rotation, activations, sampling (generated code)", r"^cpp_fused"),
    ("copying and zeroing", r"^(__)?mem(set|cpy|move)"),
    ("torch's other operators", r"at::"),
    ("memory allocation", r"malloc|free|alloc"),
    ("kernel", r"^\[k\]"),
)


def profile(worker: Worker, work: Path, action: str, **arguments: Any) -> dict[str, float]:
    """Shares of the samples of both threads while a worker runs an action, by kind; empty without `perf`."""
    if shutil.which("perf") is None:
        return {}
    record = work / "perf.data"
    command = ["perf", "record", "-e", "cpu-clock", "-F", "2000", "-p", str(worker.pid), "-o", str(record)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as perf:
        started = threading.Event()
        started.wait(1.0)
        worker.call(action, **arguments)
        perf.terminate()
    report = ["perf", "report", "-i", str(record), "--stdio", "--no-children", "-t", "|", "--sort", "dso,symbol"]
    text = subprocess.run(report, capture_output=True, text=True, check=False).stdout
    return group(text)


def group(report: str) -> dict[str, float]:
    """Shares by kind, largest first, of a report with a line `percent|library|[where] function` for each function."""
    shares: dict[str, float] = {}
    for line in report.splitlines():
        match = re.match(r"\s*([0-9.]+)%?\s*\|([^|]*)\|\s*(\[.\])\s*(.*)", line)
        if match is None:
            continue
        percent, library, where, function = match.groups()
        text = where if where == "[k]" else function.strip()
        kind = _find(_LIBRARIES, library) or _find(_KINDS, text) or f"the rest of {library.strip()}"
        shares[kind] = shares.get(kind, 0.0) + float(percent) / 100
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _find(kinds: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((kind for kind, pattern in kinds if re.search(pattern, text)), None)
