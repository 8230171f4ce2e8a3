"""Job specs: everything that a build process needs to know, and the digests that identify its result. The compiler
keeps them in its database, where tags name them: keep a tag when you rename its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bundle.digest import canonical_json, sha256_bytes
from bundle.host.path_texts import read_path, write_path
from bundle.manifest import ABI_VERSION, Target
from compiler_svc.config import InferenceConfig
from compiler_svc.planning.adapters import ListedAdapter
from compiler_svc.weights.checkpoint import Checkpoint
from targets.cpu import TORCH
from targets.registry import TARGETS
from targets.target import Lowering
from targets.toolchain import Toolchain


class _CommonJobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every job spec has.

    Attributes:
        model: Checkpoint directory, or an adapter, absolute, symbolic links resolved; until it is fetched, the outline
            of a URL's.
        model_roots: Directories that may contain its files; none once it has been fetched.
        url: What the client named, if it named no path.
    """

    name: str
    model: Path
    model_roots: tuple[Path, ...]
    warnings: tuple[str, ...]
    url: str = ""

    @property
    def source(self) -> str:
        """URL of `model`, or its path below its model root, such as `owner/model`: the same on every host."""
        if self.url:
            return self.url
        roots = [root.resolve() for root in self.model_roots]
        below = [self.model.relative_to(root).as_posix() for root in roots if root in self.model.parents]
        return min(below, key=len, default=self.model.name)


class _BundleJobSpec(_CommonJobSpec, frozen=True, kw_only=True):
    """The fields of jobs that make bundles."""

    config: InferenceConfig
    skip_cache_lookup: bool


class CompileJobSpec(_BundleJobSpec, frozen=True, kw_only=True, tag="CompileSpec"):
    """The job of one accepted Compile. The salt enters every action digest. `debug` keeps the graphs beside the bundle
    and enters none: executables and bundle are the same. `weights` is the directory of the quantized weights that it
    takes in place of the model's, and `weights_roots` may contain their files. `adapters` come with the bundle, and
    `adapter_roots` may contain their files.
    """

    target: Target
    optimization_level: Literal[0, 1, 2]
    salt: str
    debug: bool = False
    weights: Path | None = None
    weights_roots: tuple[Path, ...] = ()
    adapters: tuple[ListedAdapter, ...] = ()
    adapter_roots: tuple[Path, ...] = ()

    @property
    def lowering(self) -> Lowering:
        """The lowering that makes the executables."""
        return TARGETS[self.target.kind].lowerings[self.optimization_level]

    @property
    def toolchain(self) -> Toolchain:
        """The tools whose versions determine the bundle's bytes."""
        return self.lowering.toolchain

    def bundle_action_digest(self, *, checkpoint_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies the bundle that this compile makes: equal digests mean equal bundles, whatever their names.

        `checkpoint_digest` covers weights, configuration and tokenizer files; `toolchain` has the versions of every
        tool that shapes executables.
        """
        return self._digest_action(
            action="bundle",
            abi_version=ABI_VERSION,
            config=self.config.to_json(),
            checkpoint_digest=checkpoint_digest,
            toolchain=toolchain,
            code_digest=code_digest,
        )

    def executable_action_digest(
        self, *, graph_digest: str, toolchain: dict[str, str], code_digest: str, flags: Sequence[str] = ()
    ) -> str:
        """Identifies the executable that lowering makes from one graph. `code_digest` is that of the lowering code;
        `flags` are arguments of the compiler, if it takes some that depend on the configuration.
        """
        # Left out if there are none: the digests of earlier releases stay.
        given = {"flags": list(flags)} if flags else {}
        return self._digest_action(
            action="executable", graph_digest=graph_digest, toolchain=toolchain, code_digest=code_digest, **given
        )

    def _digest_action(self, **inputs: Any) -> str:
        options = {
            "target": msgspec.to_builtins(self.target),
            "optimization_level": self.optimization_level,
            "salt": self.salt,
        }
        return sha256_bytes(canonical_json(inputs | options))


class ShardJobSpec(_BundleJobSpec, frozen=True, kw_only=True, tag="ShardSpec"):
    """The job of one accepted ShardWeights: writing weights for executables of a bundle, given by its digest."""

    executables: str

    @property
    def toolchain(self) -> Toolchain:
        """The tools whose versions determine the bundle's bytes."""
        return TORCH

    def bundle_action_digest(self, *, checkpoint_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies the bundle that this job makes; see `CompileJobSpec.bundle_action_digest`."""
        inputs = {
            "action": "weights",
            "abi_version": ABI_VERSION,
            "executables": self.executables,
            "checkpoint_digest": checkpoint_digest,
            "toolchain": toolchain,
            "code_digest": code_digest,
        }
        return sha256_bytes(canonical_json(inputs))


class QuantizeJobSpec(_CommonJobSpec, frozen=True, kw_only=True, tag="QuantizeSpec"):
    """The job of one accepted QuantizeWeights: writing a quantized checkpoint into a new directory, `output`. Its name
    is that of the directory, which no bundle can have.
    """

    output: Path
    dtype: str
    layout: str
    modules_to_not_convert: tuple[str, ...]

    @property
    def toolchain(self) -> Toolchain:
        """The tools whose versions determine the checkpoint's bytes."""
        return TORCH

    @property
    def skip_cache_lookup(self) -> bool:
        """There is no cache of checkpoints, but equal jobs that run at the same time are one."""
        return False

    def bundle_action_digest(self, *, checkpoint_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies what this job writes, and where."""
        inputs = {
            "action": "checkpoint",
            "checkpoint_digest": checkpoint_digest,
            "output": str(self.output),
            "dtype": self.dtype,
            "layout": self.layout,
            "modules_to_not_convert": list(self.modules_to_not_convert),
            "toolchain": toolchain,
            "code_digest": code_digest,
        }
        return sha256_bytes(canonical_json(inputs))


class AdapterJobSpec(_CommonJobSpec, frozen=True, kw_only=True, tag="AdapterSpec"):
    """The job of one accepted ShardAdapter: dividing an adapter, `model`, among the ranks of executables of a bundle,
    given by its digest.
    """

    executables: str

    @property
    def toolchain(self) -> Toolchain:
        """The tools whose versions determine the bundle's bytes."""
        return TORCH

    @property
    def skip_cache_lookup(self) -> bool:
        """Clients cannot ask for it: a bundle of an adapter is made in seconds."""
        return False

    def bundle_action_digest(self, *, checkpoint_digest: str, toolchain: dict[str, str], code_digest: str) -> str:
        """Identifies the bundle that this job makes, which has the adapter's name in it."""
        inputs = {
            "action": "adapter",
            "abi_version": ABI_VERSION,
            "name": self.name,
            "executables": self.executables,
            "checkpoint_digest": checkpoint_digest,
            "toolchain": toolchain,
            "code_digest": code_digest,
        }
        return sha256_bytes(canonical_json(inputs))


#: The job of a build process.
JobSpec = CompileJobSpec | ShardJobSpec | QuantizeJobSpec | AdapterJobSpec


def open_checkpoint(spec: CompileJobSpec | ShardJobSpec | QuantizeJobSpec, *, read_pickles: bool = True) -> Checkpoint:
    """Opens the checkpoint of a job, as its directory has it; see `Checkpoint.open`."""
    checkpoint = Checkpoint.open(spec.model, roots=spec.model_roots, read_pickles=read_pickles)
    if not isinstance(spec, CompileJobSpec) or spec.weights is None:
        return checkpoint
    return checkpoint.with_weights(spec.weights, roots=spec.weights_roots, read_pickles=read_pickles)


def write_spec(spec: JobSpec) -> bytes:
    """Encodes a job spec as JSON."""
    return msgspec.json.encode(spec, enc_hook=write_path)


def read_spec(data: bytes) -> JobSpec:
    """Decodes the job spec that `write_spec` wrote."""
    spec: JobSpec = msgspec.json.decode(data, type=JobSpec, dec_hook=read_path)
    if not isinstance(spec, _BundleJobSpec):
        return spec
    return msgspec.structs.replace(spec, config=InferenceConfig.from_fields(msgspec.json.decode(data)["config"]))
