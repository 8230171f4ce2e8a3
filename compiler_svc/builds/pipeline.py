"""Runs a build from end to end, in a build process.

The build writes blobs into the store as it makes them; no manifest refers to them until the end. The service writes the
action cache once it has the result. So a build that fails or is killed leaves neither a bundle nor a cache entry.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from bundle.manifest import Tokenizer, Tokens
from bundle.store.layout import Layout
from bundle.store.oci import NEURON_CONFIG_TYPE, TOKENIZER_TYPE
from bundle.store.reader import Bundle, open_bundle
from bundle.store.referrers import add_referrer
from bundle.store.writer import BundleWriter
from compiler_svc.builds.adapter_stage import AdapterStage, build_adapter
from compiler_svc.builds.build import Build, Forkservers
from compiler_svc.builds.build_record import BuildRecorder, describe_facts
from compiler_svc.builds.checkpoint_stage import quantize_checkpoint
from compiler_svc.builds.debug_file import DEBUG_TYPE, TITLE, GraphHeader, GraphsHeader, GraphsWriter
from compiler_svc.builds.executable_stage import build_executables
from compiler_svc.builds.finished_lowerings import FinishedLowerings
from compiler_svc.builds.finished_shards import FinishedShards, digest_inputs
from compiler_svc.builds.golden_stage import GoldenStage
from compiler_svc.builds.job import BuildJob, BuildResult, JobDirectory, JobResult
from compiler_svc.builds.manifest_stage import describe_bundle, describe_tokenizer
from compiler_svc.builds.neuron_files import attach_companions
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.builds.text_stage import check_text
from compiler_svc.builds.tokenizer_stage import convert_tokenizer, follow_transformers
from compiler_svc.builds.weight_stage import WeightStage, with_shards
from compiler_svc.config import InferenceConfig
from compiler_svc.config.interchange import to_neuron_config_json
from compiler_svc.database import leases
from compiler_svc.database.engine import Database
from compiler_svc.errors import BuildFailed
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.planning.job_spec import (
    AdapterJobSpec,
    CompileJobSpec,
    QuantizeJobSpec,
    ShardJobSpec,
    open_checkpoint,
)
from compiler_svc.planning.model_overrides import override_model
from compiler_svc.planning.weights_fit import check_weights_fit, warn_of_other_tokenizer
from compiler_svc.records import Stage
from compiler_svc.sharding.plan import find_tied_tensors
from compiler_svc.trace.annotated_graph import annotate_graph
from compiler_svc.trace.export import export_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.inventory import set_surplus_aside, warn_of_surplus
from compiler_svc.weights.model_card import read_origin
from compiler_svc.weights.tensors import check_tied_head, check_zeros
from compiler_svc.weights.tokenizer_sources import TOKENIZER_FILE

# The name that NxD Inference gives the file.
CONFIG_TITLE: Final = "neuron_config.json"


def run_build(job: BuildJob, directory: JobDirectory, report: ProgressReport, forkservers: Forkservers) -> JobResult:
    """Does a job: publishes a bundle, or writes a checkpoint. One that fails raises KilnError, and leaves neither."""
    if isinstance(job.spec, QuantizeJobSpec):
        return quantize_checkpoint(job, job.spec, directory, report)
    database = Database(job.environment.database_url)
    with Layout(job.environment.store).pinning() as layout:
        if isinstance(job.spec, CompileJobSpec) and job.graphs_of is not None:
            result = keep_graphs(job.spec, job.graphs_of, layout, report)
        elif isinstance(job.spec, CompileJobSpec):
            result = build_bundle(
                job, job.spec, layout, database, directory=directory, report=report, forkservers=forkservers
            )
        elif isinstance(job.spec, AdapterJobSpec):
            result = build_adapter(job.spec, layout, report)
        else:
            result = build_weights(job, job.spec, layout, directory, report=report, forkservers=forkservers)
        # The pins end with this process. Until a version names the bundle, a lease keeps it.
        database.run_and_wait(
            leases.set_lease,
            holder=leases.BUILD_HOLDER,
            digest=result.bundle_digest,
            duration_s=leases.BUILD_DURATION_S,
        )
    return result


def build_bundle(
    job: BuildJob,
    spec: CompileJobSpec,
    layout: Layout,
    database: Database,
    directory: JobDirectory,
    *,
    report: ProgressReport,
    forkservers: Forkservers,
) -> BuildResult:
    """Compiles a checkpoint."""
    checkpoint = override_model(open_checkpoint(spec), spec.config)
    plan = plan_build(checkpoint, spec.config.neuron_config, target=spec.target.kind)
    checkpoint, warnings = _open_tensors(plan, checkpoint)
    checkpoint, text_warnings = _prepare_text(checkpoint, plan.tokens, directory, forkservers)
    build = Build(
        job=job,
        spec=spec,
        checkpoint=checkpoint,
        plan=plan,
        layout=layout,
        database=database,
        finished=FinishedLowerings(directory.lowered),
        work=directory.work,
        report=report,
        forkservers=forkservers,
    )
    writer, recorder = BundleWriter(layout), BuildRecorder(report)

    # First, because they take seconds to refuse.
    model = plan.model
    adapters = AdapterStage(model.description, model.dtype, model.tp_degree, layout, writer, report)
    adapted = [adapters.publish(one.name, one.path, roots=spec.adapter_roots) for one in spec.adapters]
    executables = build_executables(build)
    for executable in executables:
        if executable.traced.shares_with is None:
            writer.add_blob(executable.blob, executable.media_type, executable.title)

    weights = _open_weight_stage(job, plan, checkpoint, directory, report)
    config, blob_path = spec.config.neuron_config, layout.blob_path
    if config.skip_sharding:
        shards = weights.describe()
    elif config.save_sharded_checkpoint:
        shards = weights.publish(layout, writer)
    else:
        aside = Layout.create(directory.aside)
        shards, blob_path = weights.write_aside(aside), partial(_find_blob, layout, aside)
    tokenizer_files = [writer.add_blob(file, TOKENIZER_TYPE, file.name) for file in checkpoint.tokenizer_files]
    _add_config(writer, spec.config, checkpoint)
    _add_describing_files(writer, checkpoint)
    manifest = describe_bundle(build, executables, shards, tokenizer_files, adapted)

    unchecked: tuple[str, ...] = ()
    if not config.skip_sharding:
        golden = GoldenStage(job, directory, report, forkservers, plan, checkpoint, config, blob_path)
        recorder.golden, unchecked = golden.check(manifest)
    if not config.save_sharded_checkpoint:
        manifest = with_shards(manifest, weights.describe())

    report.enter(Stage.PUBLISH, "publishing")
    results = tuple(executable.result for executable in executables)
    origin, doubts = read_origin(checkpoint)
    digest = writer.publish(manifest, origin=origin)
    warnings = (*warnings, *doubts, *text_warnings, *unchecked)
    recorder.attach(layout, digest, manifest, results, (*spec.warnings, *warnings))
    attach_companions(build, digest, executables)
    return BuildResult(
        bundle_digest=digest,
        executables=results,
        new_executables={built.traced.action_digest: built.lowered for built in executables if not built.is_cached},
        facts=describe_facts(build, executables),
        warnings=warnings,
    )


def build_weights(
    job: BuildJob,
    spec: ShardJobSpec,
    layout: Layout,
    directory: JobDirectory,
    *,
    report: ProgressReport,
    forkservers: Forkservers,
) -> BuildResult:
    """Writes a checkpoint's weights for the executables of a bundle."""
    layout.pin(spec.executables)
    executables = open_bundle(layout, spec.executables)
    checkpoint = override_model(open_checkpoint(spec), spec.config)
    plan = plan_build(checkpoint, spec.config.neuron_config, target=executables.manifest.target.kind)
    check_weights_fit(executables.manifest, plan)
    checkpoint, warnings = _open_tensors(plan, checkpoint)
    checkpoint, text_warnings = _prepare_text(checkpoint, plan.tokens, directory, forkservers)
    text_warnings = (*text_warnings, *warn_of_other_tokenizer(checkpoint, executables.manifest))
    writer, recorder = BundleWriter(layout), BuildRecorder(report)

    shards = _open_weight_stage(job, plan, checkpoint, directory, report).publish(layout, writer)
    manifest = with_shards(executables.manifest, shards)

    config = spec.config.neuron_config
    golden = GoldenStage(job, directory, report, forkservers, plan, checkpoint, config, layout.blob_path)
    recorder.golden, unchecked = golden.check(manifest)

    report.enter(Stage.PUBLISH, "publishing")
    tokenizer = _add_tokenizer(writer, layout, checkpoint, executables)
    # This bundle has weights even if the executables' bundle was compiled without.
    neuron_config = replace(config, save_sharded_checkpoint=True, skip_sharding=False)
    _add_config(writer, replace(spec.config, neuron_config=neuron_config), checkpoint)
    _add_describing_files(writer, checkpoint)
    whole = {"save_sharded_checkpoint": True, "skip_sharding": False}
    resolved = manifest.config | {"neuron_config": manifest.config["neuron_config"] | whole}
    weights_only = msgspec.structs.replace(
        manifest,
        config=resolved,
        executables=(),
        checkpoint_digest=job.checkpoint_digest,
        tokens=plan.tokens,
        tokenizer=tokenizer,
        adapters=(),
    )
    origin, doubts = read_origin(checkpoint)
    digest = writer.publish(weights_only, origin=origin)
    warnings = (*warnings, *doubts, *text_warnings, *unchecked)
    recorder.attach(layout, digest, weights_only, (), (*spec.warnings, *warnings))
    return BuildResult(bundle_digest=digest, executables=(), new_executables={}, warnings=warnings)


def _open_weight_stage(
    job: BuildJob, plan: BuildPlan, checkpoint: Checkpoint, directory: JobDirectory, report: ProgressReport
) -> WeightStage:
    inputs = digest_inputs(plan.weights, checkpoint, job.checkpoint_digest)
    return WeightStage(plan, checkpoint, report, FinishedShards(directory.sharded, inputs))


def _prepare_text(
    checkpoint: Checkpoint, tokens: Tokens, directory: JobDirectory, forkservers: Forkservers
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Gives the checkpoint transformers' tokenizer, and tries it; returns the checkpoint, and warnings."""
    texts = forkservers.texts
    converted, warnings = convert_tokenizer(checkpoint, tokens, directory.work, texts)
    tried = check_text(converted, tokens, texts)
    if converted is not checkpoint:
        return converted, (*warnings, *tried)
    followed, warnings = follow_transformers(checkpoint, tokens, directory.work, texts)
    if followed is not checkpoint:
        tried = check_text(followed, tokens, texts)
    return followed, (*warnings, *tried)


def _add_tokenizer(
    writer: BundleWriter, layout: Layout, checkpoint: Checkpoint, executables: Bundle
) -> Tokenizer | None:
    """Adds the checkpoint's tokenizer to a bundle of weights, or, if it has none, that of the executables' bundle."""
    files = [(file.name, file) for file in checkpoint.tokenizer_files]
    if TOKENIZER_FILE in dict(files):
        return describe_tokenizer(checkpoint, [writer.add_blob(file, TOKENIZER_TYPE, name) for name, file in files])
    # Of the checkpoint's other files no text is made, and they may have the names of the bundle's.
    for layer in executables.image.layers:
        if layer.media_type == TOKENIZER_TYPE:
            writer.add_blob(layout.stored(layer.digest), TOKENIZER_TYPE, layer.title)
    return executables.manifest.tokenizer


def _open_tensors(plan: BuildPlan, checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Checks what headers alone could not say; returns the checkpoint with what the model takes, and the warnings that
    opening pickles brings.
    """
    description, checkpoint = plan.model.description, set_surplus_aside(checkpoint)
    check_zeros(checkpoint)
    if description.is_tied:
        check_tied_head(checkpoint, *find_tied_tensors(description, checkpoint))
    return checkpoint, tuple(warn_of_surplus(checkpoint)) if checkpoint.is_pickled else ()


def _add_config(writer: BundleWriter, config: InferenceConfig, checkpoint: Checkpoint) -> None:
    content = to_neuron_config_json(config, checkpoint.config)
    writer.add_blob(content.encode(), NEURON_CONFIG_TYPE, CONFIG_TITLE)


def _add_describing_files(writer: BundleWriter, checkpoint: Checkpoint) -> None:
    for file in checkpoint.describing_files:
        writer.add_blob(file.path, file.media_type, file.path.name)
    if checkpoint.is_gguf:
        content = json.dumps(checkpoint.whole_config, indent=2, sort_keys=True, allow_nan=False)
        writer.add_blob(content.encode(), "application/json", "config.json")


def _find_blob(layout: Layout, aside: Layout, digest: str) -> Path:
    return (aside if aside.has(digest) else layout).blob_path(digest)


def keep_graphs(spec: CompileJobSpec, digest: str, layout: Layout, report: ProgressReport) -> BuildResult:
    """Traces the executables of a bundle again and attaches their graphs. Leaves the bundle as it is.

    Traces again even right after a build: builds trace without source lines, which take a third of the tracing time.
    Another process may have traced a cached bundle long ago.
    """
    layout.pin(digest)
    manifest = open_bundle(layout, digest).manifest
    checkpoint = override_model(open_checkpoint(spec), spec.config)
    plan = plan_build(checkpoint, spec.config.neuron_config, target=spec.target.kind)
    graph_digests = {executable.tag: executable.graph_digest for executable in manifest.executables}
    writer = GraphsWriter(GraphsHeader(bundle=digest, code_digest=digest_bundle_code(), executables=len(graph_digests)))
    for submodel in plan.submodels:
        report.enter(Stage.PUBLISH, f"keeping the graph of {submodel.tag}")
        traced = export_submodel(plan.model, plan.weights, submodel, with_sources=True)
        if traced.graph_digest != graph_digests.get(submodel.tag):
            raise BuildFailed(f"{submodel.tag} has another graph now: its checkpoint changed after it was compiled")
        inputs = [*(tensor.name for tensor in submodel.inputs), *submodel.state]
        operations = list(annotate_graph(traced.program, inputs))
        header = GraphHeader(executable=submodel.tag, graph_digest=traced.graph_digest, operations=len(operations))
        writer.add(header, operations)
    add_referrer(layout, digest, DEBUG_TYPE, DEBUG_TYPE, writer.finish(), title=TITLE)
    return BuildResult(bundle_digest=digest, executables=(), new_executables={})
