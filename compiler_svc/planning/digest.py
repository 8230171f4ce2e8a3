"""The plan digest, by which a plan finds executables in the cache: the digest of a graph's inputs.

The cache's own key, the action digest, needs the graph, and tracing a graph takes torch and seconds. Equal plan digests
mean equal graphs and equal lowering. The reverse does not hold: a plan may miss an executable that the compile finds.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import msgspec

from bundle.digest import canonical_json, sha256_bytes
from bundle.manifest import Target
from compiler_svc.planning.build_plan import BuildPlan
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.trace.submodels import ExecutableSpec
from targets.registry import TARGETS


def digest_plan(plan: BuildPlan, *, target: Target, optimization_level: Literal[0, 1, 2], salt: str) -> dict[str, str]:
    """Computes the plan digest of every executable of a build, by tag."""
    shared = {
        "model": plan.model.to_json(),
        # Graphs cast weights that keep the checkpoint's dtypes.
        "weight_dtypes": {tensor.name: tensor.dtype for tensor in plan.weights.tensors},
        "target": msgspec.to_builtins(target),
        "optimization_level": optimization_level,
        "salt": salt,
        "toolchain": TARGETS[target.kind].lowerings[optimization_level].toolchain.read_versions(),
        "code_digest": digest_bundle_code(),
    }
    # Hashed once, because it is long for large models and equal for all executables.
    shared_digest = sha256_bytes(canonical_json(msgspec.to_builtins(shared)))
    return {
        submodel.tag: sha256_bytes(
            canonical_json({"shared": shared_digest, "submodel": _describe(submodel.graph_key(plan.model))})
        )
        for submodel in plan.submodels
    }


def _describe(submodel: ExecutableSpec) -> object:
    return msgspec.to_builtins(asdict(submodel))
