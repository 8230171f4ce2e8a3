"""The graphs of a bundle, kept beside it with the lines of code that they come from."""

from __future__ import annotations

from bundle.layout import Layout
from bundle.reader import open_bundle
from bundle.referrers import add_referrer
from compiler_svc.builds.code_digest import BUNDLE_CODE, digest_code
from compiler_svc.builds.job import BuildResult
from compiler_svc.builds.plan import plan_build
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.debug_file import DEBUG_TYPE, TITLE, GraphHeader, GraphsHeader, GraphsWriter
from compiler_svc.errors import BuildFailed
from compiler_svc.model_overrides import override_model
from compiler_svc.records import Stage
from compiler_svc.spec import CompileSpec
from compiler_svc.trace.annotated_graph import annotate_graph
from compiler_svc.trace.export import export_submodel
from compiler_svc.weights.checkpoint import Checkpoint


def keep_graphs(spec: CompileSpec, digest: str, layout: Layout, report: ProgressReport) -> BuildResult:
    """Traces the executables of a bundle once more and attaches their graphs. The bundle stays as it is.

    Traced again also where they have just been built: builds do without source lines, which cost them a third of the
    tracing, and a bundle from the cache was traced by another process long ago.

    Args:
        spec: What the bundle was built from.
        digest: Of the bundle.
        layout: Pins what is written.

    Raises:
        BuildFailed: A graph is not the one that the bundle has.
        BundleNotFound: The bundle is gone.
    """
    layout.pin(digest)
    manifest = open_bundle(layout, digest).manifest
    checkpoint = override_model(Checkpoint.open(spec.model, roots=spec.model_roots), spec.config)
    plan = plan_build(checkpoint, spec.config.neuron_config)
    graph_digests = {executable.tag: executable.graph_digest for executable in manifest.executables}
    writer = GraphsWriter(
        GraphsHeader(bundle=digest, code_digest=digest_code(BUNDLE_CODE), executables=len(graph_digests))
    )
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
