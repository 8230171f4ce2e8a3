"""The stage that makes executables: traces graphs, then finds their executables in the cache or lowers them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from bundle.abi.inputs import LEFT_PADDED, LIVE_ROWS
from bundle.digest import sha256_file
from bundle.manifest import ConstantBinding, Executable
from bundle.store.blob_writer import StoredBlob
from compiler_svc.builds.build import Build
from compiler_svc.builds.finished_lowerings import FinishedLowering
from compiler_svc.database import actuals, cache
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.lower.job import LiveInputs, LoweringJob, LoweringOptions, NeuronSubmodel, PickedTokens
from compiler_svc.lower.neuron.flags import CompilerOptions, list_flags
from compiler_svc.lower.pool import LoweringPool, LoweringProgress
from compiler_svc.lower.program import stage_job
from compiler_svc.planning.code_digest import LOWERING_CODE, NEURON_LOWERING_CODE, digest_code
from compiler_svc.planning.cost import estimate_lowering_s
from compiler_svc.records import ExecutableResult, Stage
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodel_document import MAKE_MODULE
from compiler_svc.trace.submodels import ExecutableSpec, describe_state
from targets.neuron import NEURON_PYTHON
from targets.registry import find_format


@dataclass(frozen=True)
class TracedExecutable:
    """An executable whose graph is known.

    Attributes:
        shares_with: An earlier executable of the build with an equal graph, if there is one: this one takes its result.
        finished: The result of an earlier attempt at this build, if there is one.
        job: The lowering to run; None if there is a result.
    """

    spec: ExecutableSpec
    graph_digest: str
    constants: tuple[ConstantBinding, ...]
    action_digest: str
    shares_with: TracedExecutable | None
    cached: CachedExecutable | None
    finished: FinishedLowering | None
    job: LoweringJob | None


@dataclass(frozen=True)
class BuiltExecutable:
    """An executable in the store, and its lowering time; None if it was cached or another one had the same graph."""

    traced: TracedExecutable
    lowered: CachedExecutable
    duration_s: float | None

    @property
    def is_cached(self) -> bool:
        """Whether the executable was there: in the cache, or as another one's."""
        return self.duration_s is None

    @property
    def blob(self) -> StoredBlob:
        """The executable's file in the store."""
        return StoredBlob(self.lowered.blob, self.lowered.size_bytes)

    @property
    def media_type(self) -> str:
        """OCI media type of the file."""
        return find_format(self.lowered.format).media_type

    @property
    def title(self) -> str:
        """Path of the file in the bundle."""
        return f"executables/{self.traced.spec.tag}{find_format(self.lowered.format).suffix}"

    @property
    def result(self) -> ExecutableResult:
        """The record for the caller of the compile."""
        return ExecutableResult(
            tag=self.traced.spec.tag,
            submodel=self.traced.spec.submodel,
            bucket=self.traced.spec.bucket,
            cached=self.is_cached,
            duration_s=self.duration_s,
            size_bytes=self.lowered.size_bytes,
        )

    def describe(self) -> Executable:
        """Describes the executable for the manifest."""
        spec = self.traced.spec
        return Executable(
            tag=spec.tag,
            submodel=spec.submodel,
            bucket=spec.bucket,
            batch_size=spec.batch_size,
            format=self.lowered.format,
            state_convention=self.lowered.state_convention,
            blob=self.lowered.blob,
            inputs=spec.inputs,
            outputs=spec.outputs,
            state=spec.state,
            constants=tuple(self._bind_constants()),
            graph_digest=self.traced.graph_digest,
            flags=spec.flags,
            neff=self.lowered.neff,
        )

    def _bind_constants(self) -> Iterator[ConstantBinding]:
        """Yields the constants that the executable needs. A NEFF names weights as the shard does."""
        for constant in self.traced.constants:
            named = constant if self.lowered.neff is None else msgspec.structs.replace(constant, name=constant.tensor)
            if named.name in self.lowered.constants:
                yield named


def build_executables(build: Build) -> tuple[BuiltExecutable, ...]:
    """Traces every executable, lowers those that are not in the cache, and puts them into the store."""
    report = build.report
    report.enter(Stage.TRACE, "exporting the graphs")
    report.update(executables_total=len(build.plan.submodels))
    traced = []
    toolchain = build.spec.toolchain.read_versions()
    by_graph: dict[ExecutableSpec, TracedExecutable] = {}
    for submodel in build.plan.submodels:
        equal = by_graph.get(key := submodel.graph_key(build.plan.model))
        if equal is not None:
            traced.append(replace(equal, spec=submodel, shares_with=equal, cached=None, finished=None, job=None))
            continue
        report.update(message=f"exporting {submodel.tag}")
        with report.measuring(f"export {submodel.tag}"):
            by_graph[key] = _trace(build, submodel, toolchain)
        traced.append(by_graph[key])
    missing = [one for one in traced if one.job is not None]
    eta_s = _estimate_lowering_s(build, missing)
    report.enter(Stage.LOWER, "compiling the graphs", eta_s=eta_s)
    for one in traced:
        if one.cached is not None:
            report.add_executable(f"{one.spec.tag} is in the cache", cached=True, eta_s=eta_s)
        elif one.finished is not None:
            report.add_executable(f"{one.spec.tag} was compiled before the restart", cached=False, eta_s=eta_s)
        elif one.shares_with is not None:
            report.add_executable(f"{one.spec.tag} shares {one.shares_with.spec.tag}", cached=False, eta_s=eta_s)
    finished = _lower(build, missing)
    built: dict[str, BuiltExecutable] = {}
    for one in traced:
        if one.shares_with is None:
            built[one.spec.tag] = _store(build, one, finished)
        else:
            built[one.spec.tag] = replace(built[one.shares_with.spec.tag], traced=one, duration_s=None)
    return tuple(built.values())


def _trace(build: Build, submodel: ExecutableSpec, toolchain: dict[str, str]) -> TracedExecutable:
    spec = build.spec
    traced = export_submodel(build.plan.model, build.plan.weights, submodel)
    neuron = describe_for_neuron(build, submodel, toolchain)
    action_digest = spec.executable_action_digest(
        graph_digest=traced.graph_digest,
        toolchain=toolchain,
        code_digest=digest_code(LOWERING_CODE if neuron is None else NEURON_LOWERING_CODE),
        flags=() if neuron is None else neuron.flags,
    )
    cached = None if spec.skip_cache_lookup else _find_cached(build, action_digest)
    finished = build.finished.find(action_digest) if cached is None else None
    staged = None
    if cached is None and finished is None:
        # Staged at once, so that only one program is in memory at a time.
        staged = stage_job(
            traced.program,
            tag=submodel.tag,
            num_state=len(submodel.state),
            options=LoweringOptions(optimization_level=spec.optimization_level, target=spec.target),
            directory=build.work / submodel.tag,
            cache_dir=build.job.environment.lowering_cache,
            live=find_live_inputs(submodel),
            neuron=neuron,
        )
    return TracedExecutable(
        spec=submodel,
        graph_digest=traced.graph_digest,
        constants=traced.constants,
        action_digest=action_digest,
        shares_with=None,
        cached=cached,
        finished=finished,
        job=staged,
    )


def find_live_inputs(submodel: ExecutableSpec) -> LiveInputs | None:
    """Finds the inputs by which an executable's code may skip what is not live; None if it takes none."""
    places = {spec.name: place for place, spec in enumerate(submodel.inputs)}
    if LIVE_ROWS not in places:
        return None
    # Of tokens at a row's end, no number of leading ones says which are live.
    counts = None if LEFT_PADDED in submodel.flags else places.get("num_tokens")
    params = places.get("sampling_params")
    picked = None
    if params is not None:
        outputs = [spec.name for spec in submodel.outputs]
        picked = PickedTokens(sampling_params=params, tokens=outputs.index("tokens"))
    return LiveInputs(rows=places[LIVE_ROWS], tokens=places["input_ids"], counts=counts, picked=picked)


def _find_cached(build: Build, action_digest: str) -> CachedExecutable | None:
    cached = build.database.run_and_wait(cache.find_executable, action_digest)
    if cached is None or not build.layout.pin(cached.blob):
        return None
    if sha256_file(build.layout.blob_path(cached.blob)) != cached.blob:
        # The file is corrupt. Unless it is deleted, the store keeps it when lowering makes the same blob again.
        build.layout.delete_blob(cached.blob)
        return None
    return cached


def _estimate_lowering_s(build: Build, missing: Sequence[TracedExecutable]) -> float | None:
    if not missing:
        return None
    spec = build.spec
    return estimate_lowering_s(
        [one.spec.submodel for one in missing],
        build.database.run_and_wait(actuals.list_lowerings, spec.target.kind, spec.optimization_level),
        num_layers=len(build.plan.model.description.layers),
        num_lowerings=build.job.environment.num_lowerings,
        optimization_level=spec.optimization_level,
    )


def _lower(build: Build, traced: Sequence[TracedExecutable]) -> dict[str, FinishedLowering]:
    """Runs the lowering jobs and keeps each result at once; returns the results by tag."""
    environment = build.job.environment
    action_digests = {one.spec.tag: one.action_digest for one in traced}
    finished: dict[str, FinishedLowering] = {}

    def keep(progress: LoweringProgress) -> None:
        tag = progress.tag
        finished[tag] = build.finished.keep(action_digests[tag], progress.executable, progress.duration_s)
        rounds_left = math.ceil((progress.total - progress.done) / environment.num_lowerings)
        mean_s = sum(one.duration_s for one in finished.values()) / len(finished)
        build.report.add_part(f"lower {tag}", progress.duration_s)
        build.report.add_executable(f"{tag} is compiled", cached=False, eta_s=rounds_left * mean_s)

    pool = LoweringPool(
        build.forkservers.lowerings,
        num_processes=environment.num_lowerings,
        timeout_s=environment.lowering_timeout_s,
        memory_limit_bytes=environment.lowering_memory_bytes,
    )
    asyncio.run(pool.lower([one.job for one in traced if one.job is not None], keep))
    return finished


def _store(build: Build, traced: TracedExecutable, finished: dict[str, FinishedLowering]) -> BuiltExecutable:
    if traced.cached is not None:
        return BuiltExecutable(traced, traced.cached, None)
    result = traced.finished or finished[traced.spec.tag]
    # Copied, not moved: if this attempt is killed from here on, the next one still finds the file.
    build.layout.ingest_file(build.finished.path(traced.action_digest))
    return BuiltExecutable(traced, result.executable, result.duration_s)


def describe_for_neuron(build: Build, submodel: ExecutableSpec, toolchain: dict[str, str]) -> NeuronSubmodel | None:
    """Describes a submodel for the interpreter with Neuron's packages; None if this one lowers for the target."""
    spec, config = build.spec, build.spec.config.neuron_config
    interpreter = spec.toolchain.interpreter
    if interpreter is None:
        return None
    dtypes = {tensor.dtype for tensor in build.plan.weights.tensors}
    dtypes |= {tensor.dtype for tensor in describe_state(build.plan.model).tensors}
    return NeuronSubmodel(
        make_module=MAKE_MODULE,
        document=build.plan.write_submodel(build.checkpoint.config, submodel),
        flags=list_flags(
            submodel.submodel,
            CompilerOptions(
                logical_nc_config=config.logical_nc_config,
                cc_pipeline_tiling_factor=config.cc_pipeline_tiling_factor,
                scratchpad_page_size=config.scratchpad_page_size,
                max_context_length=config.max_context_length,
                dtypes=frozenset(dtypes),
            ),
            optimization_level=spec.optimization_level,
            target=spec.target.kind,
            compiler_version=toolchain[f"{NEURON_PYTHON.name}.neuronx-cc"],
        ),
        logical_nc_config=config.logical_nc_config,
        tp_degree=build.plan.model.tp_degree,
    )
