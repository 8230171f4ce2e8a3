"""What a deployment takes of this host, and whether this host can run it at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bundle.manifest import Manifest
from execution.isa import require_isa
from runtime_svc.bundles.source import ResolvedBundle
from runtime_svc.capabilities import Capabilities
from runtime_svc.deployments.cores import CorePool
from runtime_svc.deployments.deployment import Deployment
from runtime_svc.deployments.memory import MemoryNeed, MemoryPool, state_need, weights_need
from runtime_svc.errors import CoresUnavailable, ExecutablesMissing
from targets.cpu import CPU
from targets.errors import IsaUnsupported

#: What this host has.
HOST_TARGET: Final = CPU


@dataclass(frozen=True, slots=True)
class Resources:
    """Cores and memory that deployments share, and whether requests can capture inputs."""

    cores: CorePool
    memory: MemoryPool
    input_capture: bool = False

    def prefer_cores(self, deployment: Deployment) -> None:
        """Takes as many cores as a deployment had before, the same ones where they are free.

        Raises:
            CoresUnavailable: There are too few.
        """
        preferred = deployment.preferred_cores
        deployment.cores = self.cores.reserve(len(preferred), (), preferred)

    def reserve(self, deployment: Deployment, weights: Manifest) -> None:
        """Takes what a deployment needs whose bundle was found.

        Args:
            deployment: Keeps the cores that it has, if it has any.
            weights: Of the bundle whose weights it uses.

        Raises:
            ManifestInvalid: Its executables do not cover what its limits promise.
            RequestInvalid: It asks for other than one core a rank.
            CoresUnavailable, MemoryUnavailable: There is too little; nothing has been taken.
        """
        assert deployment.bundle is not None
        manifest = deployment.bundle.manifest
        deployment.capabilities = Capabilities.from_manifest(manifest, input_capture=self.input_capture)
        needs = (state_need(manifest), weights_need(weights))
        had_cores = bool(deployment.cores)
        if not had_cores:
            deployment.cores = self.cores.reserve(manifest.tp_degree, deployment.spec.cores)
        elif len(deployment.cores) != manifest.tp_degree:
            raise CoresUnavailable(f"the bundle needs {manifest.tp_degree} cores", deployment.cores)
        try:
            self.memory.reserve(*needs)
        except BaseException:
            if not had_cores:
                self.cores.release(deployment.cores)
                deployment.cores = ()
            raise
        deployment.state_memory, deployment.weights_memory = needs

    def release(self, deployment: Deployment) -> None:
        """Gives back what a deployment holds; calling it again is harmless."""
        self.cores.release(deployment.cores)
        self.memory.release(deployment.state_memory, deployment.weights_memory)
        deployment.preferred_cores = deployment.cores or deployment.preferred_cores
        deployment.cores = ()
        deployment.state_memory = deployment.weights_memory = MemoryNeed()


def check_bundle(bundle: ResolvedBundle) -> None:
    """Checks that this host can run a bundle.

    Raises:
        ExecutablesMissing: It holds weights only.
        IsaUnsupported: It was made for other hardware.
        FormatUnknown, FormatInvalid: Nothing installed here runs its executables.
    """
    if not bundle.manifest.has_executables:
        raise ExecutablesMissing(bundle.ref)
    _check_target(bundle.manifest)


def _check_target(manifest: Manifest) -> None:
    kind, isas = HOST_TARGET.kind, HOST_TARGET.isas
    if manifest.target.kind != kind:
        supported, known = ([f"{kind}/{isa}" for isa in names] for names in (isas.list_supported(), isas.names))
        raise IsaUnsupported(f"{manifest.target.kind}/{manifest.target.isa}", supported, known)
    require_isa(manifest)
