"""`python3.11 -m tests.device.xla`: makes the environment and runs the tests in it; arguments are pytest's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.device.xla.environment import VARIABLES, EnvironmentUnavailable, make_environment

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venv-xla"
#: LLVM leaves out its optimizations: graphs are the same, and compile in half the time. torch-xla keeps few of them:
#: each takes a hundred mappings of memory, and the whole run would take more than Linux gives a process.
COMPILER = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "XLA_COMPILATION_CACHE_SIZE": "32"}


def main() -> int:
    """Gives pytest's exit code; 0 if the environment cannot be made, unless tools are required."""
    try:
        python = make_environment(ENVIRONMENT)
    except EnvironmentUnavailable as error:
        sys.stderr.write(f"test-xla skipped: {error.reason}\n")
        return int(os.environ.get("KILN_REQUIRE_TOOLS") == "1")
    command = [python, "-m", "pytest", Path(__file__).parent, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | COMPILER | VARIABLES, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
