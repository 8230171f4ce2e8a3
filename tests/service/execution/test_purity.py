"""The parent's side of execution stays light."""

import json
import subprocess
import sys

from tests.repository import ROOT

HEAVY = {"torch", "numpy", "safetensors"}
CODE = """
import json, sys
import execution.errors, execution.failure, execution.isa, execution.step
import execution.forkserver.parent_death, execution.ranks.group
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_the_parents_side_loads_no_tensors() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert not HEAVY & set(json.loads(result.stdout))
