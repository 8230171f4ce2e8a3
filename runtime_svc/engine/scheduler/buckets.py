"""Which executable fits: static shapes against token counts."""

from __future__ import annotations

from dataclasses import dataclass

from bundle.abi.submodels import SubmodelName
from bundle.errors import ManifestInvalid
from bundle.manifest import Executable, Manifest


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Executables by submodel, smallest bucket first."""

    context_encoding: tuple[Executable, ...]
    token_generation: tuple[Executable, ...]

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> BucketTable:
        """The executables of a bundle.

        Raises:
            ManifestInvalid: The executables do not cover the limits that the manifest states.
        """
        limits = manifest.limits
        table = cls(
            _executables_of(manifest, "context_encoding", batch_size=limits.ctx_batch_size),
            _executables_of(manifest, "token_generation", batch_size=limits.tkg_batch_size),
        )
        # The last token of a sequence is never computed.
        if table.token_generation[-1].bucket[0] < limits.max_length - 1:
            largest = table.token_generation[-1].tag
            raise ManifestInvalid(f"{largest} is the largest bucket at limits.max_length {limits.max_length}")
        return table

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that an executable takes."""
        return self.context_encoding[-1].bucket[0]

    def for_prompt(self, num_tokens: int) -> Executable:
        """Smallest context_encoding bucket of at least `num_tokens`."""
        return next(one for one in self.context_encoding if one.bucket[0] >= num_tokens)

    def for_position(self, position: int) -> Executable:
        """Smallest token_generation bucket beyond `position`, the active token's place from 0."""
        return next(one for one in self.token_generation if one.bucket[0] > position)


def _executables_of(manifest: Manifest, submodel: SubmodelName, *, batch_size: int) -> tuple[Executable, ...]:
    executables = manifest.executables_of(submodel)
    if not executables:
        raise ManifestInvalid(f"it has no executable of {submodel}")
    for executable in executables:
        if executable.batch_size != batch_size:
            raise ManifestInvalid(f"{executable.tag} has {executable.batch_size} rows; the limits say {batch_size}")
    return executables
