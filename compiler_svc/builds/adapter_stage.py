"""The stage that writes adapters, a file for each rank; and the bundle of one adapter for executables that exist."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from bundle.abi.tensor import DType
from bundle.manifest import BundledAdapter
from bundle.store.layout import Layout
from bundle.store.oci import WEIGHTS_TYPE
from bundle.store.reader import open_bundle
from bundle.store.writer import BundleWriter
from compiler_svc.adapters.files import open_adapter
from compiler_svc.adapters.fitting import fit_adapter
from compiler_svc.builds.build_record import BuildRecorder
from compiler_svc.builds.job import BuildResult
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import GraphAbiMismatch
from compiler_svc.models.description import ModelDescription
from compiler_svc.planning.bundled_model import describe_bundled_model
from compiler_svc.planning.job_spec import AdapterJobSpec
from compiler_svc.records import Stage

#: Names of adapters may have slashes.
_TITLE: Final = "adapters/{name}.tp{rank}.safetensors"


@dataclass(frozen=True)
class AdapterStage:
    """Writes adapters of one model into a bundle. The model has room for them."""

    description: ModelDescription
    dtype: DType
    tp_degree: int
    layout: Layout
    writer: BundleWriter
    report: ProgressReport

    def publish(self, name: str, path: Path, *, roots: Sequence[Path]) -> BundledAdapter:
        """Fits an adapter, streams its files into the store, and adds them to the bundle.

        Raises AdapterInvalid for all that is wrong with it; `roots` are as in `open_adapter`.
        """
        self.report.enter(Stage.SHARD, f"writing the adapter {name}")
        adapter = open_adapter(path, roots=roots)
        fitted = fit_adapter(adapter, self.description, dtype=self.dtype, tp_degree=self.tp_degree)
        ranks = range(self.tp_degree)
        with ExitStack() as unfinished:
            sinks = {rank: unfinished.enter_context(self.layout.new_blob()) for rank in ranks}
            fitted.write(sinks)
            blobs = [sinks[rank].commit() for rank in ranks]
        for rank, blob in enumerate(blobs):
            self.writer.add_blob(blob, WEIGHTS_TYPE, _TITLE.format(name=quote(name, safe=""), rank=rank))
        shards = (fitted.plan.describe_shard(rank, blob.digest, blob.size_bytes) for rank, blob in enumerate(blobs))
        return BundledAdapter(name=name, digest=fitted.digest, shards=tuple(shards))


def build_adapter(spec: AdapterJobSpec, layout: Layout, report: ProgressReport) -> BuildResult:
    """Divides an adapter among the ranks of a bundle's executables."""
    layout.pin(spec.executables)
    executables = open_bundle(layout, spec.executables)
    base, manifest = describe_bundled_model(executables), executables.manifest
    writer, recorder = BundleWriter(layout), BuildRecorder(report)
    stage = AdapterStage(base.description, base.config.torch_dtype, manifest.tp_degree, layout, writer, report)
    adapter = stage.publish(spec.name, spec.model, roots=spec.model_roots)
    for slots, shard in zip(manifest.shards(mutable=True), adapter.shards, strict=True):
        if shard.tensors != slots.entry().tensors:
            names = ([one.name for one in each.tensors] for each in (shard, slots))
            raise GraphAbiMismatch("adapters", *names)
    report.enter(Stage.PUBLISH, "publishing")
    alone = msgspec.structs.replace(
        manifest,
        executables=(),
        weight_sets=(),
        adapters=(adapter,),
        checkpoint_digest=adapter.digest,
        tokenizer=None,
    )
    digest = writer.publish(alone)
    recorder.attach(layout, digest, alone, (), spec.warnings)
    return BuildResult(bundle_digest=digest, executables=(), new_executables={})
