"""The peers that Kiln is measured beside, in an environment of their own: their requirements are not ours.

Workers as `bench.eager` is one, with the same actions; `load` converts the checkpoint first, where that was not done.
"""

from __future__ import annotations

from pathlib import Path

ENVIRONMENT = Path(__file__).parents[2] / ".kiln" / "bench-peers"
