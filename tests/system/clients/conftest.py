"""Commands in homes of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.lowering_cache import share_lowering_cache
from tests.servers.stack import KILN, Outcome

TIMEOUT_S: Final = 280
#: What compiles fast.
SMALL: Final = (
    "-O",
    "0",
    *("--override", "neuron_config.seq_len=128"),
    *("--override", "neuron_config.torch_dtype=float32"),
)


@contextmanager
def make_home(path: Path) -> Iterator[Path]:
    """A home whose services end with the block."""
    share_lowering_cache(path / "cache/compiler")
    yield path
    subprocess.run([KILN, "down", "--home", path], check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)


def run_kiln(home: Path, *arguments: str | Path) -> Outcome:
    """Runs `kiln ARGUMENTS --home HOME --json`, which has to succeed."""
    command = [KILN, *map(str, arguments), "--home", str(home), "--json"]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ,
    )
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, (events[-1:], result.stderr)
    return Outcome(result.returncode, events)
