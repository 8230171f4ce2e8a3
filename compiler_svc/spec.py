"""What one compile is: everything that a build process needs to know, and what identifies its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from bundle.digest import canonical_json, sha256_bytes
from bundle.manifest import ABI_VERSION, Target
from compiler_svc.config import InferenceConfig


class CompileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted compile.

    Attributes:
        name: Bundle name.
        model: Checkpoint directory, absolute, symbolic links resolved.
        model_roots: Directories that the checkpoint's files may lie in.
        config: Resolved configuration.
        optimization_level: 0, 1 or 2.
        skip_cache_lookup: Build even where the cache has the result.
        salt: Enters every action digest.
        warnings: Notes on the configuration.
    """

    name: str
    model: Path
    model_roots: tuple[Path, ...]
    config: InferenceConfig
    target: Target
    optimization_level: Literal[0, 1, 2]
    skip_cache_lookup: bool
    salt: str
    warnings: tuple[str, ...]

    def bundle_action_digest(self, *, checkpoint_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies the bundle that this compile makes: equal digests mean equal bundles, whatever their names.

        Args:
            checkpoint_digest: Digest of the weights, configuration and tokenizer files.
            toolchain: Versions of everything that shapes executables.
            code_digest: Digest of this compiler's own code.
        """
        return digest_action(
            self,
            action="bundle",
            abi_version=ABI_VERSION,
            config=self.config.to_json(),
            checkpoint_digest=checkpoint_digest,
            toolchain=toolchain,
            code_digest=code_digest,
        )

    def executable_action_digest(self, *, graph_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies what lowering makes of one graph.

        Args:
            graph_digest: Digest of the exported graph.
            toolchain: Versions of everything that shapes executables.
            code_digest: Digest of the lowering code.
        """
        return digest_action(
            self, action="executable", graph_digest=graph_digest, toolchain=toolchain, code_digest=code_digest
        )


def digest_action(spec: CompileSpec, **inputs: Any) -> str:
    """Digest of an action's inputs, together with the options that every action has."""
    return sha256_bytes(
        canonical_json(
            {
                **inputs,
                "target": msgspec.to_builtins(spec.target),
                "optimization_level": spec.optimization_level,
                "salt": spec.salt,
            }
        )
    )
