"""A compile from end to end, in a build process.

Blobs enter the store on the way, where nothing refers to them until the manifest is published; the action cache is
written by the service once it has the result. So a build that fails, or is killed, leaves nothing that counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bundle.digest import canonical_json
from bundle.layout import Layout
from bundle.manifest import WeightShard
from bundle.oci import NEURON_CONFIG_TYPE, TOKENIZER_TYPE, WEIGHTS_TYPE
from bundle.writer import BundleWriter
from compiler_svc.builds.build import Build
from compiler_svc.builds.executable_stage import build_executables
from compiler_svc.builds.job import BuildJob, BuildResult
from compiler_svc.builds.manifest_stage import describe_bundle, resolved_config
from compiler_svc.builds.plan import plan_build
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.database.engine import Database
from compiler_svc.golden.check import check_golden
from compiler_svc.records import Stage
from compiler_svc.sharding.writer import write_shard
from compiler_svc.weights.checkpoint import Checkpoint

# NxD Inference's names.
CONFIG_TITLE: Final = "neuron_config.json"
WEIGHTS_TITLE: Final = "weights/tp{rank}_sharded_checkpoint.safetensors"


def build_bundle(job: BuildJob, work: Path, report: ProgressReport) -> BuildResult:
    """Builds and publishes one bundle.

    Args:
        work: Scratch directory of this build alone.

    Raises:
        KilnError: What went wrong; nothing was published.
    """
    checkpoint = Checkpoint.open(job.spec.model, roots=job.spec.model_roots)
    plan = plan_build(checkpoint, job.spec.config.neuron_config)
    layout = Layout(job.environment.store)
    build = Build(job, checkpoint, plan, layout, Database(job.environment.database_url), work, report)
    writer = BundleWriter(layout)

    executables = build_executables(build)
    for executable in executables:
        writer.add_blob(executable.blob, executable.media_type, executable.title)

    report.enter(Stage.SHARD, "writing the rank weight shards")
    report.update(total_bytes=plan.weights.shard_size_bytes * plan.model.tp_degree)
    shards = [add_shard(build, writer, rank) for rank in range(plan.model.tp_degree)]
    tokenizer_files = [writer.add_blob(file, TOKENIZER_TYPE, file.name) for file in checkpoint.tokenizer_files]
    writer.add_blob(canonical_json(resolved_config(build)), NEURON_CONFIG_TYPE, CONFIG_TITLE)
    manifest = describe_bundle(build, executables, shards, tokenizer_files)

    report.enter(Stage.VERIFY, "comparing logits with the reference")
    check_golden(manifest, layout.blob_path, checkpoint)

    report.enter(Stage.PUBLISH, "publishing")
    return BuildResult(
        bundle_digest=writer.publish(manifest),
        executables=tuple(executable.result for executable in executables),
        new_executables={built.traced.action_digest: built.lowered for built in executables if not built.is_cached},
    )


def add_shard(build: Build, writer: BundleWriter, rank: int) -> WeightShard:
    """Streams one rank's weights into the store, hashing them on the way."""
    with build.layout.new_blob() as blob:
        write_shard(build.plan.weights, build.checkpoint, rank, blob, progress=build.report.add_sharded_bytes)
        stored = blob.commit()
    writer.add_blob(stored, WEIGHTS_TYPE, WEIGHTS_TITLE.format(rank=rank))
    return build.plan.weights.describe_shard(rank, stored.digest, stored.size_bytes)
