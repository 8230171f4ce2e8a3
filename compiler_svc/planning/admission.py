"""Validates compile requests: finds every mistake that shows without torch and without reading weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from bundle.errors import FieldViolation
from bundle.manifest import Target, TargetKind
from bundle.reference import is_new_name
from compiler_svc.config import MoENeuronConfig, NeuronConfig, Resolution, read_config
from compiler_svc.config.model_rules import model_rules
from compiler_svc.config.submodels import describe_submodels
from compiler_svc.config.tables.documents import ATTENTION, MOE
from compiler_svc.errors import ConfigInvalid, FeatureNotServed, NameInvalid
from compiler_svc.models.token_ids import warn_of_ids_beyond
from compiler_svc.planning.adapters import find_unmatched_targets, list_adapters, read_adapters
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.planning.checkpoint_quantization import note_activations, read_quantization, warn_of_other_bits
from compiler_svc.planning.job_spec import CompileJobSpec
from compiler_svc.planning.model_overrides import check_head_sharding, keep_changes
from compiler_svc.planning.model_roots import find_checkpoint
from compiler_svc.planning.sampling import warn_of_unserved_generation
from compiler_svc.remote.errors import OutlineMissing
from compiler_svc.remote.urls import NO_URLS, UrlSettings, check_url, is_url
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import (
    QUANTIZED_PATH,
    CheckpointInvalid,
    QuantizedCheckpointInvalid,
)
from compiler_svc.weights.held_sizes import check_sizes
from compiler_svc.weights.inventory import set_surplus_aside, take_inventory, warn_of_surplus
from compiler_svc.weights.overrides import override_checkpoint
from compiler_svc.weights.tokenizer_sources import TOKENIZER_FILE, find_incomplete_source
from targets.isa import CPUINFO, NATIVE
from targets.registry import TARGETS

#: Of one bundle. Two lists of buckets may multiply each other.
MAX_EXECUTABLES: Final = 1024


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """The fields of a request that determine executables and weights. The model is a checkpoint directory, absolute or
    relative to a model root; without `isa`, the compiler's default holds; the salt is part of every cache key.
    """

    model: str
    document: dict[str, Any]
    target_kind: TargetKind
    isa: str
    optimization_level: Literal[0, 1, 2]
    salt: str


@dataclass(frozen=True, kw_only=True)
class CompileRequest(BuildRequest):
    """A Compile request of a client."""

    name: str
    skip_cache_lookup: bool
    debug: bool = False


def admit_request(
    request: CompileRequest, model_roots: tuple[Path, ...], *, default_isa: str = "", urls: UrlSettings = NO_URLS
) -> CompileJobSpec:
    """Validates a request. Reads JSON files and tensor headers, and takes as long as they make it take. Leaves pickled
    weights to the build, because opening them needs torch.
    """
    if not is_new_name(request.name):
        raise NameInvalid(request.name)
    target = choose_target(request, default_isa)
    checkpoint, resolution = resolve_request(request, model_roots, urls, compiles=True)
    adapters = list_adapters(resolution.config.neuron_config.lora_config, model_roots)
    if not checkpoint.is_pickled:
        plan_build(checkpoint, resolution.config.neuron_config, target=target.kind)
    return CompileJobSpec(
        name=request.name,
        model=checkpoint.path,
        model_roots=model_roots,
        url=request.model if is_url(request.model) else "",
        config=resolution.config,
        target=target,
        optimization_level=request.optimization_level,
        skip_cache_lookup=request.skip_cache_lookup,
        salt=request.salt,
        debug=request.debug,
        weights=checkpoint.weights_path,
        weights_roots=() if checkpoint.weights_path is None else model_roots,
        adapters=adapters,
        adapter_roots=model_roots if adapters else (),
        warnings=(
            *resolution.warnings,
            *warn_of_unused_instructions(request, target),
            *find_warnings(checkpoint, resolution.config.neuron_config, target.kind),
        ),
    )


def resolve_request(
    request: BuildRequest, model_roots: tuple[Path, ...], urls: UrlSettings = NO_URLS, *, compiles: bool = False
) -> tuple[Checkpoint, Resolution]:
    """Resolves a configuration and opens its checkpoint, but no pickles. Mistakes that need no checkpoint come first.

    Returns the checkpoint with the configuration's model attributes, and the configuration with those that change it.
    """
    given = read_config(request.document, target=request.target_kind, compiles=compiles)
    checkpoint = open_model(request.model, model_roots, urls)
    changes, notes = keep_changes(checkpoint, given.model_attributes, given.attribute_map)
    checkpoint = override_checkpoint(checkpoint, changes, given.attribute_map)
    check_sizes(checkpoint)
    if given.quantized_path is not None:
        checkpoint = take_quantized_weights(checkpoint, given.quantized_path, model_roots)
    resolution = given.resolve(read_declared_dtype(checkpoint), read_quantization(checkpoint, request.target_kind))
    adapters = read_adapters(resolution.config.neuron_config.lora_config, model_roots, is_strict=compiles)
    widened = adapters.widen(resolution.config.neuron_config)
    config = replace(resolution.config, model_attributes=changes, neuron_config=widened)
    check_num_executables(config.neuron_config)
    check_head_sharding(request.document, checkpoint, tp_degree=config.neuron_config.tp_degree)
    if broken := model_rules(config.neuron_config, checkpoint.config):
        raise ConfigInvalid(broken)
    check_claims(checkpoint, config.neuron_config)
    check_positions(checkpoint, config.neuron_config)
    warnings = (*resolution.warnings, *notes, *adapters.notes)
    return set_surplus_aside(checkpoint), replace(resolution, config=config, warnings=warnings)


def take_quantized_weights(checkpoint: Checkpoint, path: str, model_roots: tuple[Path, ...]) -> Checkpoint:
    """The checkpoint with the weights of another directory, a path as `find_checkpoint` takes them, which are its own,
    but quantized. Leaves pickles to the build.
    """
    directory = find_checkpoint(path, model_roots, field=QUANTIZED_PATH)
    quantized = checkpoint.with_weights(directory, roots=model_roots, read_pickles=False)
    if not quantized.is_pickled and (mistakes := take_inventory(quantized.description, quantized).mistakes):
        raise QuantizedCheckpointInvalid(path, str(CheckpointInvalid.listing(directory, mistakes)))
    return quantized


def check_positions(checkpoint: Checkpoint, config: NeuronConfig) -> None:
    """Checks that a model which learned its positions has one for each token of the longest sequence."""
    description = checkpoint.description
    positions, longest = description.max_position_embeddings, config.longest_sequence
    if description.positions is not None and longest > positions:
        accepted = f"at most {positions}, the positions that the model has learned"
        raise ConfigInvalid([FieldViolation("neuron_config.seq_len", str(longest), accepted)])


def choose_target(request: BuildRequest, default_isa: str = "") -> Target:
    """Chooses the target, and replaces `native` by the host's own level. If the client names no instruction set, takes
    `default_isa`; if that is empty, the target's own default.
    """
    target = TARGETS[request.target_kind]
    if not target.is_served:
        served = ", ".join(kind for kind, one in TARGETS.items() if one.is_served)
        raise FeatureNotServed(
            [FieldViolation("target.kind", request.target_kind, f"{served}, all that this version serves")]
        )
    isa = target.isas.resolve(request.isa, default=default_isa)
    lowering = target.lowerings[request.optimization_level]
    if lowering.format.is_native and target.isas.levels:
        target.isas.require(isa)
    lowering.toolchain.require_programs()
    return Target(kind=target.kind, isa=isa)


def open_model(model: str, model_roots: tuple[Path, ...], urls: UrlSettings) -> Checkpoint:
    """Opens the checkpoint that a path or URL names, but no pickles; of a URL's, the outline."""
    if not is_url(model):
        return Checkpoint.open(find_checkpoint(model, model_roots), roots=model_roots, read_pickles=False)
    return Checkpoint.open(find_outline(model, urls), read_pickles=False)


def find_outline(model: str, urls: UrlSettings) -> Path:
    """Finds the outline of what a URL names; raises OutlineMissing if it has to be fetched."""
    url = check_url(model, urls.prefixes)
    if url not in urls.outlines:
        raise OutlineMissing(url)
    return urls.outlines[url]


def read_declared_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype that a checkpoint's `config.json` declares, without `torch.`; None if it declares none."""
    declared = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return declared.removeprefix("torch.") if isinstance(declared, str) else None


def find_warnings(checkpoint: Checkpoint, config: NeuronConfig, target: TargetKind) -> tuple[str, ...]:
    """Lists the warnings about a valid compile."""
    return (
        *warn_of_untrained_positions(checkpoint, config),
        *warn_of_unchecked_executables(config, target),
        *warn_of_parts_left_out(checkpoint),
        *warn_of_surplus(checkpoint),
        *warn_of_ids_beyond(checkpoint.config, checkpoint.generation_config, checkpoint.description.vocab_size),
        *warn_of_other_bits(checkpoint, config),
        *note_activations(checkpoint, config),
        *find_unmatched_targets(config.lora_config, checkpoint.description),
        *warn_of_unread_tokenizer(checkpoint, "so the bundle takes token ids only, no text"),
        *warn_of_unserved_generation(checkpoint.generation_config, config, target),
    )


def warn_of_unused_instructions(request: BuildRequest, target: Target, cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Says what it costs on this host that executables travel: the instructions that they leave unused."""
    isas, lowerings = TARGETS[target.kind].isas, TARGETS[target.kind].lowerings
    unused = isas.list_unused(target.isa, cpuinfo)
    if not unused or not lowerings[request.optimization_level].format.is_native:
        return ()
    gains = "; ".join(f"with {level.name}, {level.gain}" if level.gain else level.name for level in unused)
    return (f"target.isa: {target.isa} runs on more hosts than {NATIVE}, and leaves some of this host unused: {gains}",)


def warn_of_untrained_positions(checkpoint: Checkpoint, config: NeuronConfig) -> tuple[str, ...]:
    """Warns if sequences can exceed the positions that the model was trained for."""
    trained = checkpoint.description.max_position_embeddings
    if config.longest_sequence <= trained:
        return ()
    return (f"neuron_config.seq_len: {config.longest_sequence} tokens exceed the model's {trained} positions",)


def warn_of_unchecked_executables(config: NeuronConfig, target: TargetKind) -> tuple[str, ...]:
    """Warns if the golden check runs no executables, or may run none."""
    if not config.skip_sharding and not TARGETS[target].is_checked_on_host:
        by = f"free cores of {target} on the compiler's host, or by XLA on its CPU in their place"
        return (f"target.kind: what is compared with the reference is computed by {by}; golden.json says which did",)
    if not config.skip_sharding:
        return ()
    return ("neuron_config.skip_sharding: the executables are not compared with the reference, which takes weights",)


def warn_of_parts_left_out(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names the parts of the checkpoint that the bundle will not have; of pickles, those that they may have."""
    description = checkpoint.description
    parts = [description.find_left_out(name) for name in checkpoint.tensors] or description.left_out
    if not (counts := Counter(part for part in parts if part is not None)):
        return ()
    named = ", ".join(f"{part} ({count} tensors)" if checkpoint.tensors else part for part, count in counts.items())
    return (f"model: left out, because only its text model is served: {named}",)


def warn_of_unread_tokenizer(checkpoint: Checkpoint, consequence: str) -> tuple[str, ...]:
    """Warns of a consequence if files of a tokenizer are there, but not enough to make one."""
    source = find_incomplete_source(checkpoint)
    if source is None:
        return ()
    return (f"model: of {' and '.join(source.files)} it has one, and no {TOKENIZER_FILE}, {consequence}",)


def check_num_executables(config: NeuronConfig) -> None:
    """Limits the number of executables, since each one costs minutes of compiling."""
    num_executables = sum(len(submodel.buckets) for submodel in describe_submodels(config))
    if num_executables > MAX_EXECUTABLES:
        value = f"lists of buckets that make {num_executables} executables"
        raise ConfigInvalid([FieldViolation("neuron_config", value, f"at most {MAX_EXECUTABLES} executables")])


def check_claims(checkpoint: Checkpoint, config: NeuronConfig) -> None:
    """Checks that a model has the norms of queries and keys, or lacks the gates, that the configuration speaks of. NxD
    Inference adds norms that no checkpoint has weights for, and lets a dense model have its gates.
    """
    description = checkpoint.description
    violations: list[FieldViolation] = []

    def refuse(name: str, value: Any, accepted: str) -> None:
        violations.append(FieldViolation(f"neuron_config.{name}", str(value), accepted))

    if config.qk_layernorm and all(layer.attention.query_norm is None for layer in description.layers):
        accepted = f"False: {description.architecture} does not normalize queries and keys ({ATTENTION})"
        refuse("qk_layernorm", config.qk_layernorm, accepted)
    is_gated = any(layer.feed_forward.gate is not None for layer in description.layers)
    if isinstance(config, MoENeuronConfig) and not config.glu_mlp and is_gated:
        refuse("glu_mlp", config.glu_mlp, f"True: the MLP of {description.architecture} has gates ({MOE})")
    if violations:
        raise FeatureNotServed(violations)
