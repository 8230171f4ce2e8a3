"""What is to be built: everything that a build process needs to know, and what identifies its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from bundle.digest import canonical_json, sha256_bytes
from bundle.manifest import ABI_VERSION, Target
from compiler_svc.config import InferenceConfig
from targets.cpu import TORCH
from targets.registry import TARGETS
from targets.target import Lowering
from targets.toolchain import Toolchain


class _Spec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What all specifications have.

    Attributes:
        name: Bundle name.
        model: Checkpoint directory, absolute, symbolic links resolved.
        model_roots: Directories that the checkpoint's files may lie in.
        config: Resolved configuration.
        skip_cache_lookup: Build even where the cache has the result.
        warnings: Notes for the caller.
    """

    name: str
    model: Path
    model_roots: tuple[Path, ...]
    config: InferenceConfig
    skip_cache_lookup: bool
    warnings: tuple[str, ...]


class CompileSpec(_Spec, frozen=True, kw_only=True):
    """One accepted compile.

    Attributes:
        optimization_level: 0, 1 or 2.
        salt: Enters every action digest.
        debug: Keep the graphs beside the bundle. Enters no action digest: executables and bundle are the same.
    """

    target: Target
    optimization_level: Literal[0, 1, 2]
    salt: str
    debug: bool = False

    @property
    def lowering(self) -> Lowering:
        """How the executables are made."""
        return TARGETS[self.target.kind].lowerings[self.optimization_level]

    @property
    def toolchain(self) -> Toolchain:
        """What the bundle's bytes depend on."""
        return self.lowering.toolchain

    def bundle_action_digest(self, *, checkpoint_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies the bundle that this compile makes: equal digests mean equal bundles, whatever their names.

        Args:
            checkpoint_digest: Digest of the weights, configuration and tokenizer files.
            toolchain: Versions of everything that shapes executables.
            code_digest: Digest of this compiler's own code.
        """
        return self._digest_action(
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
        return self._digest_action(
            action="executable", graph_digest=graph_digest, toolchain=toolchain, code_digest=code_digest
        )

    def _digest_action(self, **inputs: Any) -> str:
        options = {
            "target": msgspec.to_builtins(self.target),
            "optimization_level": self.optimization_level,
            "salt": self.salt,
        }
        return sha256_bytes(canonical_json(inputs | options))


class ShardSpec(_Spec, frozen=True, kw_only=True):
    """Weights to be written for executables that exist.

    Attributes:
        executables: Digest of the bundle that has them.
    """

    executables: str

    @property
    def toolchain(self) -> Toolchain:
        """What the bundle's bytes depend on."""
        return TORCH

    def bundle_action_digest(self, *, checkpoint_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies the bundle that this makes; see `CompileSpec.bundle_action_digest`."""
        inputs = {
            "action": "weights",
            "abi_version": ABI_VERSION,
            "executables": self.executables,
            "checkpoint_digest": checkpoint_digest,
            "toolchain": toolchain,
            "code_digest": code_digest,
        }
        return sha256_bytes(canonical_json(inputs))


#: What a build process can be asked for.
BuildSpec = CompileSpec | ShardSpec


def write_spec(spec: BuildSpec) -> bytes:
    """A specification as JSON."""
    return msgspec.json.encode(spec, enc_hook=str)


def read_spec(data: bytes) -> BuildSpec:
    """The specification that `write_spec` wrote.

    Raises:
        ValueError: It is none; another version's may have other fields.
    """
    spec: BuildSpec = msgspec.json.decode(data, type=BuildSpec, dec_hook=read_path)
    return msgspec.structs.replace(spec, config=InferenceConfig.from_fields(msgspec.json.decode(data)["config"]))


def read_path(kind: type, text: str) -> Path:
    """Paths are text in JSON: the hook that reads them."""
    assert kind is Path, kind
    return Path(text)
