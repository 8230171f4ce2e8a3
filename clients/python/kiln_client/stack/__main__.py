"""`python -m kiln_client.stack`: both services of a home in the background, as `kiln run` starts them.

The services take free ports; `HOME/services.json` says which.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from kiln_client.errors import HomeInUse, KilnError
from kiln_client.stack.local_stack import LOCKED_OUT, local_config
from kiln_client.stack.stack import StackAddresses, run_stack


def main() -> int:
    """Serves until SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kiln_client.stack")
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--model-root", default=[], type=Path, action="append")
    options = parser.parse_args()
    try:
        asyncio.run(run_stack(local_config(options.home, tuple(options.model_root), is_detached=True), _report))
    except KilnError as error:
        print(error, file=sys.stderr)  # noqa: T201 - standard error is the log of this process
        return LOCKED_OUT if isinstance(error, HomeInUse) else 1
    return 0


def _report(addresses: StackAddresses) -> None:
    print(f"ready compiler={addresses.compiler} runtime={addresses.runtime}", file=sys.stderr)  # noqa: T201 - as above


if __name__ == "__main__":
    sys.exit(main())
