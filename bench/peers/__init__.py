"""The peers that Kiln is compared with, in an environment of their own, because their requirements differ from ours.

Each is a worker with the actions of `bench.eager`; `load` converts the checkpoint first, unless that was done.
"""

from __future__ import annotations

from pathlib import Path

ENVIRONMENT = Path(__file__).parents[2] / ".kiln" / "bench-peers"
