"""Answers PlanCompile: predicts executables, memory and cost of a compile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bundle.manifest import Target
from bundle.store.layout import Layout
from compiler_svc.config import InferenceConfig, NeuronConfig, Resolution, resolve_config
from compiler_svc.config.submodels import SubmodelShape, describe_submodels
from compiler_svc.database import actuals
from compiler_svc.database.engine import Database
from compiler_svc.errors import ConfigInvalid, FeatureNotServed
from compiler_svc.models.description import ModelDescription
from compiler_svc.planning.admission import (
    BuildRequest,
    choose_target,
    find_warnings,
    open_model,
    read_declared_dtype,
    resolve_request,
    warn_of_unused_instructions,
)
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.planning.checkpoint_quantization import read_quantization
from compiler_svc.planning.cost import CostEstimate, Work, estimate_cost
from compiler_svc.planning.digest import digest_plan
from compiler_svc.planning.graph_check import GraphCheck, check_graphs, require_checks
from compiler_svc.planning.memory import MemoryModel, PlannedModel, RankMemory, read_model
from compiler_svc.planning.model_overrides import override_model
from compiler_svc.planning.report import PlannedExecutable, PlanReport
from compiler_svc.planning.variation import Variations
from compiler_svc.remote.urls import NO_URLS, UrlSettings
from compiler_svc.weights.checkpoint import Checkpoint
from edge.memory import measure_memory
from execution.forkserver.parent_death import end_tree_with_parent
from targets.cpu import CPU
from targets.errors import NeuronToolchainMissing
from targets.registry import TARGETS

#: Plans start the interpreter for Neuron, which alone can make the graphs that the check reads, if they are asked to.
_UNCHECKED_GRAPHS: Final = (
    "target.kind: the check of graphs for what neuronx-cc refuses has not run, because check_graphs is not set; a "
    "compile runs it on each graph before neuronx-cc is called"
)
_STORED_FLOAT8: Final = (
    "target.kind: float8 saves memory on cpu and no arithmetic, because processors of x86-64 do not multiply it"
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(BuildRequest):
    """A PlanCompile request of a client. None for `core_memory_bytes` is the target's own memory of a core."""

    core_memory_bytes: int | None
    check_graphs: bool = False


@dataclass(frozen=True, slots=True)
class RankLimit:
    """The memory that one rank may take. `physical_core_bytes` is the target's memory of a physical core; None if all
    ranks share the host's.
    """

    core_memory_bytes: int | None
    physical_core_bytes: int | None
    host_bytes: int

    def measure(self, config: NeuronConfig) -> int:
        """Bytes that a rank may take under a configuration."""
        if self.core_memory_bytes is not None:
            return self.core_memory_bytes
        if self.physical_core_bytes is None:
            return self.host_bytes // config.tp_degree
        return self.physical_core_bytes * config.logical_nc_config


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """What a planner is made of, in a process of its own. `store` is the OCI layout that holds the cache's executables;
    `num_lowerings` of one build run at once; requests without an instruction set get `default_isa`, see
    `choose_target`.
    """

    database_url: str
    store: Path
    model_roots: tuple[Path, ...]
    num_lowerings: int
    default_isa: str


def plan_compile(
    settings: PlannerSettings, request: PlanRequest, directory: Path | None = None, *, urls: UrlSettings = NO_URLS
) -> PlanReport:
    """Plans a compile; see `Planner.plan`. Opens the database for it: call it in a process of its own."""
    if request.check_graphs:
        # Not this process alone: the interpreter for Neuron would go on. Before other threads start, one of which would
        # take the signal.
        end_tree_with_parent(os.getppid())
    database = Database(settings.database_url)
    try:
        return Planner(database, settings, urls).plan(request, directory)
    finally:
        database.close()


class Planner:
    """Plans compiles for one action cache."""

    def __init__(self, database: Database, settings: PlannerSettings, urls: UrlSettings = NO_URLS) -> None:
        self._database = database
        self._layout = Layout(settings.store)
        self._settings = settings
        self._urls = urls

    def plan(self, request: PlanRequest, directory: Path | None = None) -> PlanReport:
        """Plans a compile. Reads JSON files and tensor headers, and takes as long as they make it take. `directory`
        receives the files of the check of graphs, if the request asks for it.
        """
        if request.check_graphs:
            require_checks(request.target_kind)
        target = self._check_target(request)
        checkpoint, resolution = resolve_request(request, self._settings.model_roots, self._urls)
        model, config = read_model(checkpoint), resolution.config
        planned_target = TARGETS[request.target_kind]
        draft = self._open_draft(config)
        memory_model = MemoryModel(model, draft, planned_target, request.optimization_level)
        limit = RankLimit(request.core_memory_bytes, planned_target.core_bytes, host_bytes=measure_memory())
        memory = memory_model.measure(config)
        executables = self._list_executables(request, target, model, config)
        variations = Variations(
            request.document,
            resolve=lambda document: _resolve(request, document, checkpoint, config),
            fits=lambda varied: memory_model.measure(varied).total_bytes <= limit.measure(varied.neuron_config),
        )
        return PlanReport(
            config=config,
            submodels=describe_submodels(config.neuron_config),
            memory=memory,
            limit_bytes=limit.measure(config.neuron_config),
            largest=variations.find_largest(
                config.neuron_config, trained_positions=checkpoint.description.max_position_embeddings
            ),
            cores_needed=variations.count_cores(planned_target),
            executables=executables,
            hints=resolution.hints,
            warnings=(
                *_without_hints(resolution),
                *_find_warnings(request, target, checkpoint, config, memory),
                *find_unmatched(config, model.description, None if draft is None else draft.description),
            ),
            cost=self._estimate_cost(
                request,
                Work(
                    missing=[one.submodel for one in executables if not one.is_cached],
                    num_executables=sum(not one.is_shared for one in executables),
                    num_layers=len(model.description.layers),
                    weights_bytes=memory.weights_bytes * config.neuron_config.tp_degree,
                    num_lowerings=self._settings.num_lowerings,
                ),
            ),
            graph_check=self._check_graphs(request, checkpoint, config, limit, directory),
        )

    def _check_graphs(
        self,
        request: PlanRequest,
        checkpoint: Checkpoint,
        planned: InferenceConfig,
        limit: RankLimit,
        directory: Path | None,
    ) -> GraphCheck | None:
        if not request.check_graphs:
            return None
        assert directory is not None, "checks have a directory"
        # As a compile resolves it: what that refuses has no graph.
        config = _resolve(request, request.document, checkpoint, planned, compiles=True)
        kind = request.target_kind
        build = plan_build(checkpoint, config.neuron_config, target=kind)
        memory_bytes = limit.measure(planned.neuron_config)
        return check_graphs(build, checkpoint.config, directory, target=kind, memory_bytes=memory_bytes)

    def _check_target(self, request: PlanRequest) -> Target | None:
        """The target of the executables; None if this host can plan for it but not compile."""
        if not TARGETS[request.target_kind].is_served:
            return None
        try:
            return choose_target(request, self._settings.default_isa)
        except NeuronToolchainMissing:
            return None

    def _open_draft(self, config: InferenceConfig) -> PlannedModel | None:
        fused = config.fused_spec_config
        if fused is None or not fused.draft_model_path:
            return None
        draft = open_model(fused.draft_model_path, self._settings.model_roots, self._urls)
        return read_model(draft if fused.draft_config is None else override_model(draft, fused.draft_config))

    def _list_executables(
        self, request: PlanRequest, target: Target | None, model: PlannedModel, config: InferenceConfig
    ) -> list[PlannedExecutable]:
        if target is None:
            # The cache has no executables for a target that is not served.
            return [
                PlannedExecutable(tag=_tag(submodel, bucket), submodel=submodel.name, bucket=bucket, is_cached=False)
                for submodel in describe_submodels(config.neuron_config)
                for bucket in submodel.buckets
            ]
        build = plan_build(model.checkpoint, config.neuron_config, target=target.kind)
        digests = digest_plan(build, target=target, optimization_level=request.optimization_level, salt=request.salt)
        planned = self._database.run_and_wait(actuals.find_planned, list(digests.values()))
        cached = {digest for digest, executable in planned.items() if self._layout.has(executable.blob)}
        executables: list[PlannedExecutable] = []
        listed: set[str] = set()
        for submodel in build.submodels:
            digest = digests[submodel.tag]
            executables.append(
                PlannedExecutable(
                    tag=submodel.tag,
                    submodel=submodel.submodel,
                    bucket=submodel.bucket,
                    is_cached=digest in cached | listed,
                    is_shared=digest in listed,
                )
            )
            listed.add(digest)
        return executables

    def _estimate_cost(self, request: PlanRequest, work: Work) -> CostEstimate | None:
        kind, level = request.target_kind, request.optimization_level
        lowerings = self._database.run_and_wait(actuals.list_lowerings, kind, level)
        builds = self._database.run_and_wait(actuals.list_builds, kind, level)
        return estimate_cost(work, lowerings, builds)


def _resolve(
    request: PlanRequest,
    document: Mapping[str, Any],
    checkpoint: Checkpoint,
    planned: InferenceConfig,
    *,
    compiles: bool = False,
) -> InferenceConfig:
    """Resolves a variation of what is planned, which has the same adapters."""
    config = resolve_config(
        document,
        checkpoint_dtype=read_declared_dtype(checkpoint),
        quantization=read_quantization(checkpoint, request.target_kind),
        target=request.target_kind,
        compiles=compiles,
    ).config
    neuron_config = replace(config.neuron_config, lora_config=planned.neuron_config.lora_config)
    return replace(config, neuron_config=neuron_config)


def _find_warnings(
    request: PlanRequest, target: Target | None, checkpoint: Checkpoint, config: InferenceConfig, memory: RankMemory
) -> Iterator[str]:
    if note := TARGETS[request.target_kind].note:
        yield note
    if request.target_kind != CPU.kind and not request.check_graphs:
        yield _UNCHECKED_GRAPHS
    if target is not None:
        yield from warn_of_unused_instructions(request, target)
    if target is not None and target.kind != CPU.kind:
        yield from _warn_of_uncompiled(request, checkpoint, config)
    if request.target_kind == CPU.kind and any("float8" in one for one in (*memory.kept_weights, *memory.kept_kv)):
        yield _STORED_FLOAT8
    if checkpoint.is_pickled:
        yield "model: its weights are pickles, which plans do not open: tensors are those that config.json implies"
    yield from find_warnings(checkpoint, config.neuron_config, request.target_kind)


def _warn_of_uncompiled(request: PlanRequest, checkpoint: Checkpoint, config: InferenceConfig) -> Iterator[str]:
    """Says what of the configuration a compile for the target refuses: plans reckon with more."""
    try:
        _resolve(request, request.document, checkpoint, config, compiles=True)
    except (ConfigInvalid, FeatureNotServed) as error:
        yield from (
            f"{one.field}: a compile refuses it: got {one.value}; accepted: {one.accepted}" for one in error.violations
        )


def _without_hints(resolution: Resolution) -> list[str]:
    hints = set(map(str, resolution.hints))
    return [warning for warning in resolution.warnings if warning not in hints]


def _tag(submodel: SubmodelShape, bucket: tuple[int, ...]) -> str:
    return f"{submodel.name}_{'x'.join(map(str, bucket))}"


def find_unmatched(config: InferenceConfig, model: ModelDescription, draft: ModelDescription | None) -> Iterator[str]:
    """Yields a warning for each list of modules of which some name matches none."""
    neuron = config.neuron_config
    if neuron.quantized or neuron.quantized_mlp_kernel_enabled:
        yield from _find_exclusions("modules_to_not_convert", neuron.modules_to_not_convert, model)
    if neuron.quantized and draft is not None:
        skipped = neuron.draft_model_modules_to_not_convert
        yield from _find_exclusions("draft_model_modules_to_not_convert", skipped, draft)


def _find_exclusions(name: str, skipped: Iterable[str], model: ModelDescription) -> Iterator[str]:
    quantizable = [linear.name for linear in model.linears() if linear.is_quantizable]
    unmatched = [part for part in skipped if not any(part in one for one in quantizable)]
    if unmatched:
        yield f"neuron_config.{name}: {_list(unmatched)} are in no name of a module that would be quantized"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
