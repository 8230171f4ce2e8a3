"""The stage that writes an adapter, a file for each rank; and the bundle of one adapter for executables that exist."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final
from urllib.parse import quote

import msgspec

from bundle.manifest import BundledAdapter
from bundle.store.layout import Layout
from bundle.store.oci import WEIGHTS_TYPE
from bundle.store.reader import open_bundle
from bundle.store.writer import BundleWriter
from compiler_svc.adapters.files import open_adapter
from compiler_svc.adapters.fitting import FittedAdapter, fit_adapter
from compiler_svc.builds.build_record import BuildRecorder
from compiler_svc.builds.job import BuildResult
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import GraphAbiMismatch
from compiler_svc.planning.bundled_model import describe_bundled_model
from compiler_svc.planning.job_spec import AdapterJobSpec
from compiler_svc.records import Stage

#: Names of adapters may have slashes.
_TITLE: Final = "adapters/{name}.tp{rank}.safetensors"


def build_adapter(spec: AdapterJobSpec, layout: Layout, report: ProgressReport) -> BuildResult:
    """Divides an adapter among the ranks of a bundle's executables."""
    report.enter(Stage.SHARD, "reading the adapter")
    layout.pin(spec.executables)
    executables = open_bundle(layout, spec.executables)
    base, tp_degree = describe_bundled_model(executables), executables.manifest.tp_degree
    adapter = open_adapter(spec.model, roots=spec.model_roots)
    fitted = fit_adapter(adapter, base.description, dtype=base.config.torch_dtype, tp_degree=tp_degree)
    for slots in executables.manifest.shards(mutable=True):
        own, theirs = fitted.plan.describe_shard(slots.rank, None, 0).tensors, slots.entry().tensors
        if own != theirs:
            raise GraphAbiMismatch("adapters", [one.name for one in own], [one.name for one in theirs])
    writer, recorder = BundleWriter(layout), BuildRecorder(report)
    bundled = write_adapter(fitted, spec.name, layout, writer, report)
    report.enter(Stage.PUBLISH, "publishing")
    manifest = msgspec.structs.replace(
        executables.manifest,
        executables=(),
        weight_sets=(),
        adapters=(bundled,),
        checkpoint_digest=fitted.digest,
        tokenizer=None,
    )
    digest = writer.publish(manifest)
    recorder.attach(layout, digest, manifest, (), spec.warnings)
    return BuildResult(bundle_digest=digest, executables=(), new_executables={})


def write_adapter(
    fitted: FittedAdapter, name: str, layout: Layout, writer: BundleWriter, report: ProgressReport
) -> BundledAdapter:
    """Streams the files of an adapter into the store, and adds them to a bundle."""
    ranks = range(fitted.plan.tp_degree)
    with ExitStack() as unfinished:
        blobs = {rank: unfinished.enter_context(layout.new_blob()) for rank in ranks}
        fitted.write(blobs)
        stored = [blob.commit() for blob in blobs.values()]
    for rank, blob in enumerate(stored):
        writer.add_blob(blob, WEIGHTS_TYPE, _TITLE.format(name=quote(name, safe=""), rank=rank))
    report.add_sharded_bytes(sum(blob.size_bytes for blob in stored))
    shards = (
        fitted.plan.describe_shard(rank, blob.digest, blob.size_bytes) for rank, blob in zip(ranks, stored, strict=True)
    )
    return BundledAdapter(name=name, digest=fitted.digest, shards=tuple(shards))
