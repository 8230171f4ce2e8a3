"""The stage that describes a built bundle: it makes the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bundle.abi.digest import compute_graph_abi_digest
from bundle.manifest import (
    ABI_VERSION,
    DEFAULT_CHAT_TEMPLATE,
    MODEL_WEIGHTS,
    BundledAdapter,
    Manifest,
    Tokenizer,
    TokenizerFile,
    WeightSet,
    WeightShard,
)
from bundle.store.oci import BlobDescriptor
from compiler_svc.builds.build import Build
from compiler_svc.builds.executable_stage import BuiltExecutable
from compiler_svc.builds.neuron_files import name_cores
from compiler_svc.planning.weights_fit import MODEL_ATTRIBUTES
from compiler_svc.trace.submodels import describe_adapters, describe_state
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tokenizer_sources import TOKENIZER_FILE


def describe_bundle(
    build: Build,
    executables: Sequence[BuiltExecutable],
    shards: Sequence[WeightShard],
    tokenizer_files: Sequence[BlobDescriptor],
    adapters: Iterable[BundledAdapter] = (),
) -> Manifest:
    """Makes the manifest. Executables are in manifest order, shards in that of their ranks."""
    spec, plan, model = build.spec, build.plan, build.plan.model
    described, slots = tuple(built.describe() for built in executables), describe_adapters(model)
    return Manifest(
        abi_version=ABI_VERSION,
        architecture=model.description.architecture,
        config=resolved_config(build),
        checkpoint_digest=build.job.checkpoint_digest,
        target=name_cores(spec.target, build.layout, executables),
        optimization_level=spec.optimization_level,
        toolchain=spec.toolchain.read_versions(),
        tp_degree=model.tp_degree,
        executables=described,
        weight_sets=(WeightSet(name=MODEL_WEIGHTS, shards=tuple(shards)), *slots),
        state=describe_state(model),
        sampling=plan.sampling,
        limits=plan.limits,
        tokens=plan.tokens,
        tokenizer=describe_tokenizer(build.checkpoint, tokenizer_files),
        graph_abi_digest=compute_graph_abi_digest(
            graph_digests={executable.tag: executable.graph_digest for executable in described},
            shards=[*shards, *(shard for one in slots for shard in one.shards)],
            numeric_config=model.description.numeric_config,
            tp_degree=model.tp_degree,
        ),
        serving=plan.serving,
        # The key of the bundle's cache does not know in which order a configuration lists them.
        adapters=tuple(sorted(adapters, key=lambda one: one.name)),
    )


def resolved_config(build: Build) -> dict[str, Any]:
    """The compiled configuration: `neuron_config`, the model's attributes, and the overrides of these."""
    config = build.spec.config
    sections = {name: value for name, value in config.to_json().items() if name not in config.model_attributes}
    replaced = {MODEL_ATTRIBUTES: config.model_attributes} if config.model_attributes else {}
    return dict(build.plan.model.description.numeric_config) | sections | replaced


def describe_tokenizer(checkpoint: Checkpoint, files: Sequence[BlobDescriptor]) -> Tokenizer | None:
    """Describes a checkpoint's tokenizer for the manifest; None if it has none."""
    digest = next((file.digest for file in files if file.title == TOKENIZER_FILE), None)
    if digest is None:
        return None
    return Tokenizer(
        digest=digest,
        files=tuple(TokenizerFile(title=file.title, blob=file.digest) for file in files),
        chat_template=checkpoint.chat_templates.get(DEFAULT_CHAT_TEMPLATE),
        chat_templates={
            name: source for name, source in checkpoint.chat_templates.items() if name != DEFAULT_CHAT_TEMPLATE
        },
    )
