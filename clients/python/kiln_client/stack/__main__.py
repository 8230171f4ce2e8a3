"""`python -m kiln_client.stack`: both services of a home in the background, as `kiln run` starts them.

The services take free ports; `HOME/services.json` says which.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from kiln_client.errors import KilnError
from kiln_client.stack.stack import LOCKED_OUT, StackAddresses, StackConfig, run_stack


def main() -> int:
    """Serves until SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kiln_client.stack")
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--model-root", default=[], type=Path, action="append")
    options = parser.parse_args()
    try:
        config = StackConfig.for_one_person(options.home, model_roots=tuple(options.model_root), is_detached=True)
        asyncio.run(run_stack(config, _report))
    except KilnError as error:
        print(error, file=sys.stderr)  # noqa: T201 - standard error is the log of this process
        return LOCKED_OUT if error.reason == "HOME_IN_USE" else 1
    return 0


def _report(addresses: StackAddresses) -> None:
    print(f"ready compiler={addresses.compiler} runtime={addresses.runtime}", file=sys.stderr)  # noqa: T201 - as above


if __name__ == "__main__":
    sys.exit(main())
