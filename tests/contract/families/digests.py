"""What each family's geometries are compiled to: `python -m tests.contract.families.digests` writes the digests anew.

Write them anew only for a change that is meant to change graphs: bundles that exist take no weights of another ABI.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from bundle.abi.digest import compute_graph_abi_digest
from compiler_svc.config import resolve_config
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.trace.export import export_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import write_tiny_model
from tests.contract.families.geometries import GEOMETRIES

#: By geometry, what `digest_graphs` gives; beside them the release of torch that exported the graphs.
PATH: Final = Path(__file__).with_name("digests.json")
#: Two ranks, so that what divides the model counts.
NEURON_CONFIG: Final = {
    "seq_len": 32,
    "max_context_length": 16,
    "batch_size": 2,
    "tp_degree": 2,
    "torch_dtype": "float32",
    "enable_bucketing": True,
    "context_encoding_buckets": [16],
    "token_generation_buckets": [32],
}


def read_pinned() -> dict[str, Any]:
    """The table."""
    pinned: dict[str, Any] = json.loads(PATH.read_text())
    return pinned


def digest_graphs(checkpoint: Checkpoint) -> dict[str, str]:
    """Computes the digest of each executable's graph for cpu, by tag, and that of the graph ABI, as `abi`."""
    config = resolve_config({"neuron_config": NEURON_CONFIG}, checkpoint_dtype="float32", target="cpu").config
    plan = plan_build(checkpoint, config.neuron_config, target="cpu")
    graphs = {
        submodel.tag: export_submodel(plan.model, plan.weights, submodel).graph_digest for submodel in plan.submodels
    }
    abi = compute_graph_abi_digest(
        graph_digests=graphs,
        shards=[plan.weights.describe_shard(rank, None, 0) for rank in range(plan.model.tp_degree)],
        numeric_config=plan.model.description.numeric_config,
        tp_degree=plan.model.tp_degree,
    )
    return graphs | {"abi": abi}


def main() -> None:
    """Writes the table."""
    digests = {}
    for geometry in GEOMETRIES:
        with tempfile.TemporaryDirectory() as path:
            tiny = write_tiny_model(Path(path), geometry.attributes, architecture=geometry.architecture)
            digests[str(geometry)] = digest_graphs(tiny.checkpoint)
        sys.stdout.write(f"{geometry}\n")
    PATH.write_text(json.dumps({"torch": torch.__version__, "digests": digests}, indent=2) + "\n")


if __name__ == "__main__":
    main()
