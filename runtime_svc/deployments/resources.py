"""Reserves cores and memory of this host for deployments, and checks that this host can run a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field

from bundle.manifest import Manifest
from execution.device_errors import DeviceUnsuitable
from execution.isa import require_isa
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.memory import CoreMemory, MemoryNeed, MemoryPool, state_need, step_need, weights_need
from runtime_svc.engine.config import EngineConfig
from runtime_svc.errors import CoresUnavailable, ExecutablesMissing
from targets.cpu import CPU
from targets.errors import IsaUnsupported
from targets.target import Target


@dataclass(frozen=True, slots=True)
class Resources:
    """Cores and memory that deployments share, and what this runtime lets requests of all of them do.

    `target` is that of this host; `logical_core_size` counts the physical cores of one of its logical cores.
    """

    cores: CorePool
    memory: MemoryPool
    target: Target = CPU
    logical_core_size: int = 1
    input_capture: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)

    def prefer_cores(self, deployment: Deployment) -> None:
        """Reserves as many cores as a deployment had before, the same ones if they are free."""
        preferred = deployment.preferred_cores
        deployment.cores = self.cores.reserve(deployment.deployment_id, len(preferred), (), preferred)

    def reserve(self, deployment: Deployment, weights: Manifest) -> None:
        """Reserves the cores and memory of a deployment, whose bundle is resolved.

        It keeps its cores if it holds any, and gets those that it had before if they are free.
        """
        assert deployment.bundle is not None
        manifest = deployment.bundle.manifest
        deployment.capabilities = Capabilities.from_manifest(
            manifest, input_capture=self.input_capture, engine=self.engine
        )
        core_memory = self._count_core_memory(manifest, weights)
        needs = self._find_state_need(manifest), self.find_weights_need(weights)
        had_cores = bool(deployment.cores)
        if not had_cores:
            preferred = deployment.preferred_cores
            wanted = () if preferred else deployment.spec.cores
            deployment.cores = self.cores.reserve(deployment.deployment_id, manifest.tp_degree, wanted, preferred)
        elif len(deployment.cores) != manifest.tp_degree:
            raise CoresUnavailable(f"the bundle needs {manifest.tp_degree} cores", deployment.cores, self.cores.held)
        try:
            self.memory.reserve(*needs)
        except BaseException:
            if not had_cores:
                self.cores.release(deployment.cores)
                deployment.cores = ()
            raise
        deployment.state_memory, deployment.weights_memory = needs
        deployment.core_memory = core_memory

    def _count_core_memory(self, manifest: Manifest, weights: Manifest) -> CoreMemory | None:
        """Counts the memory of a deployment's cores; None if ranks have none of their own."""
        if self.target.core_bytes is None:
            return None
        return CoreMemory(self.target.core_bytes * manifest.target.lnc, manifest, weights)

    def _find_state_need(self, manifest: Manifest) -> MemoryNeed:
        """Returns the need of this host's memory for state and steps, or for steps alone."""
        return step_need(manifest) if self.target.has_cores else state_need(manifest)

    def find_weights_need(self, weights: Manifest) -> MemoryNeed:
        """Returns the need of this host's memory for weights; none if they lie in the memory of cores."""
        return MemoryNeed() if self.target.has_cores else weights_need(weights)

    def stage(self, deployment: Deployment, weights: Manifest) -> None:
        """Reserves memory of this host, or of a deployment's cores, for weights beside those in use."""
        need = self.find_weights_need(weights)
        self.memory.reserve(need)
        # While the first weights are awaited, their memory is reserved, and the cores hold no others.
        if deployment.core_memory is not None and deployment.weights is not None:
            try:
                deployment.core_memory.stage(weights)
            except BaseException:
                self.memory.release(need)
                raise

    def unstage(self, deployment: Deployment, need: MemoryNeed) -> None:
        """Gives back the memory of weights that are mapped beside those in use no longer."""
        self.memory.release(need)
        if deployment.core_memory is not None:
            deployment.core_memory.unstage()

    def release(self, deployment: Deployment) -> None:
        """Gives back the cores and memory that a deployment holds, if it holds any."""
        self.cores.release(deployment.cores)
        self.memory.release(deployment.state_memory, deployment.weights_memory)
        deployment.preferred_cores = deployment.cores or deployment.preferred_cores
        deployment.cores = ()
        deployment.state_memory = deployment.weights_memory = MemoryNeed()
        deployment.core_memory = None


def check_bundle(bundle: ResolvedBundle, resources: Resources) -> None:
    """Checks that this host can run a bundle."""
    if not bundle.manifest.has_executables:
        raise ExecutablesMissing(bundle.ref, "LoadAdapter" if bundle.manifest.adapters else "LoadWeights")
    _check_target(bundle.manifest, resources)


def _check_target(manifest: Manifest, resources: Resources) -> None:
    kind, isas = resources.target.kind, resources.target.isas
    if manifest.target.kind != kind:
        if not isas.names:
            raise DeviceUnsuitable("target.kind", manifest.target.kind, kind)
        supported, known = ([f"{kind}/{isa}" for isa in names] for names in (isas.list_supported(), isas.names))
        raise IsaUnsupported(f"{manifest.target.kind}/{manifest.target.isa}", supported, known)
    if resources.target.has_cores and manifest.target.lnc != resources.logical_core_size:
        raise DeviceUnsuitable("target.lnc", str(manifest.target.lnc), str(resources.logical_core_size))
    require_isa(manifest)
