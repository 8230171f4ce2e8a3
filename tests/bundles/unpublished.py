"""Bundles of tiny models at optimization level 0, without a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bundle.abi.inputs import PROCESSORS
from bundle.digest import sha256_file
from bundle.manifest import MODEL_WEIGHTS, Manifest, WeightSet, WeightShard
from compiler_svc.lower.program import save_program
from compiler_svc.models.token_ids import read_token_ids
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.sharding.writer import write_shards
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import describe_adapters, describe_state, describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from tests.bundles.manifests import describe_executable, make_manifest


@dataclass(frozen=True)
class UnpublishedBundle:
    manifest: Manifest
    blobs: Mapping[str, Path]

    def blob_path(self, digest: str) -> Path:
        return self.blobs[digest]


def make_bundle(
    directory: Path,
    spec: GraphSpec,
    plan: WeightPlan,
    checkpoint: Checkpoint,
    *,
    context_buckets: tuple[int, ...],
    token_buckets: tuple[int, ...],
) -> UnpublishedBundle:
    blobs: dict[str, Path] = {}

    def add(path: Path) -> str:
        digest = sha256_file(path)
        blobs[digest] = path
        return digest

    def add_shard(rank: int) -> WeightShard:
        path = directory / f"rank{rank}.safetensors"
        with path.open("wb") as file:
            size_bytes = write_shards(plan, checkpoint, {rank: file})
        return plan.describe_shard(rank, add(path), size_bytes)

    submodels = [describe_submodel(spec, "context_encoding", bucket) for bucket in context_buckets]
    submodels += [describe_submodel(spec, "token_generation", bucket) for bucket in token_buckets]
    if PROCESSORS in spec.flags:
        submodels += [describe_submodel(spec, "token_generation", bucket, processes=True) for bucket in token_buckets]
    executables = []
    for submodel in submodels:
        traced = export_submodel(spec, plan, submodel)
        path = directory / f"{submodel.tag}.pt2"
        save_program(traced.program, path)
        executables.append(
            describe_executable(submodel, blob=add(path), constants=traced.constants, graph_digest=traced.graph_digest)
        )
    shards = tuple(add_shard(rank) for rank in range(spec.tp_degree))
    manifest = make_manifest(
        executables=executables,
        architecture=spec.description.architecture,
        tp_degree=spec.tp_degree,
        weight_sets=(WeightSet(name=MODEL_WEIGHTS, shards=shards), *describe_adapters(spec)),
        state=describe_state(spec),
        sampling=spec.sampling,
        tokens=read_token_ids(checkpoint.config, checkpoint.generation_config, spec.description.vocab_size),
    )
    return UnpublishedBundle(manifest, blobs)
