"""Which executable fits: static shapes against token counts."""

from __future__ import annotations

from dataclasses import dataclass

from bundle.manifest import Executable, Manifest


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Executables by submodel, smallest bucket first."""

    context_encoding: tuple[Executable, ...]
    token_generation: tuple[Executable, ...]

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> BucketTable:
        """The executables of a bundle."""
        return cls(manifest.executables_of("context_encoding"), manifest.executables_of("token_generation"))

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that an executable takes."""
        return self.context_encoding[-1].bucket[0]

    @property
    def max_position(self) -> int:
        """Largest position whose token an executable takes."""
        return self.token_generation[-1].bucket[0] - 1

    def for_prompt(self, num_tokens: int) -> Executable:
        """Smallest context_encoding bucket of at least `num_tokens`."""
        return next(one for one in self.context_encoding if one.bucket[0] >= num_tokens)

    def for_position(self, position: int) -> Executable:
        """Smallest token_generation bucket beyond `position`, the active token's place from 0."""
        return next(one for one in self.token_generation if one.bucket[0] > position)
