"""What an inspection of this host found out, as the lines that `kiln doctor` reads from the process that looked."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one inspection found.

    Attributes:
        ok: Whether a compile or a runtime can use what was inspected.
        summary: What was found, or what is wrong, in one line.
        advice: What to do next, a command if there is one; empty if it is ok.
    """

    ok: bool
    summary: str
    advice: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


def print_finding(finding: Finding) -> None:
    """Prints the finding as one line of JSON, the last one of the process."""
    _print_line({"finding": asdict(finding)})


def print_progress(text: str) -> None:
    """Prints what the inspection does now."""
    _print_line({"progress": text})


def _print_line(record: Mapping[str, object]) -> None:
    sys.stdout.write(f"{json.dumps(record)}\n")
    sys.stdout.flush()
