"""`python -m tests.soak --minutes 30 --seed N`: attacks a runtime with everything at once, and exits with 1 if it finds
anything that must not be.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.repository import ROOT
from tests.soak.report import render, show
from tests.soak.services import run_services
from tests.soak.soak import soak


def main() -> int:
    """Runs a soak, prints its report, and gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--seed", type=int, help="repeats the choices of a run (default: another one each time)")
    parser.add_argument(
        "--bundles", type=Path, default=ROOT / ".kiln/soak", help="where compiled bundles are kept (.kiln/soak)"
    )
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    sys.stderr.write(f"seed {seed}\n")
    with (
        tempfile.TemporaryDirectory(prefix="kiln-soak-") as directory,
        run_services(Path(directory), arguments.bundles) as services,
    ):
        report = asyncio.run(soak(services, minutes=arguments.minutes, seed=seed, show=show))
    sys.stdout.write(render(report))
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
