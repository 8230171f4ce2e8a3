"""Plans what a build makes, from configuration and checkpoint headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bundle.abi.formats import FORMATS
from bundle.abi.inputs import PROCESSORS, PROMPT_LOGPROBS
from bundle.abi.outputs import EMBEDDINGS
from bundle.errors import FieldViolation
from bundle.manifest import Limits, Sampling, Serving, TargetKind, Tokens
from compiler_svc.config import LoraServingConfig, NeuronConfig
from compiler_svc.config.submodels import count_ring_step, describe_submodels
from compiler_svc.errors import ConfigInvalid
from compiler_svc.lower.neuron.flags import OLD_FLOAT8
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.packings import UNSAID
from compiler_svc.models.parameters import MemoryGroup
from compiler_svc.models.registry import find_family
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.state import KeptAs, ScaleKind
from compiler_svc.models.token_ids import read_token_ids
from compiler_svc.models.transforms import ALL_LINEAR, INT4, Adapters, ModelChanges, Quantization
from compiler_svc.planning.adapters import TARGETS_PATH
from compiler_svc.planning.sampling import choose_generation_defaults, choose_sampling
from compiler_svc.sharding.plan import WeightPlan, find_matrices, plan_weights
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodel_document import write_document
from compiler_svc.trace.submodels import ExecutableSpec, describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.gguf.model import GgufTensor
from compiler_svc.weights.held_sizes import check_sizes
from compiler_svc.weights.packed import PackedMatrix
from targets.registry import TARGETS

#: What `kv_cache_quant` makes of keys and values.
_CAST_KV: Final = KeptAs(dtype="float8_e4m3fn")
_SCALES: Final[Mapping[str, ScaleKind]] = {
    "per_tensor_symmetric": "tensor",
    "per_key_symmetric": "head",
    "per_channel_symmetric": "channel",
}


@dataclass(frozen=True)
class BuildPlan:
    """The plan of one bundle. `changes` are what the configuration has changed in the model's description; `submodels`
    are the executables, in manifest order.
    """

    model: GraphSpec
    changes: ModelChanges
    weights: WeightPlan
    submodels: tuple[ExecutableSpec, ...]
    sampling: Sampling
    limits: Limits
    tokens: Tokens
    serving: Serving

    def write_submodel(self, model_config: Mapping[str, Any], submodel: ExecutableSpec) -> dict[str, Any]:
        """Writes a submodel as JSON, for another interpreter; see `write_document`."""
        tensors = self.weights.describe_shard(0, None, 0).tensors
        return write_document(model_config, self.model, tensors, submodel, changes=self.changes)


def plan_build(checkpoint: Checkpoint, config: NeuronConfig, *, target: TargetKind) -> BuildPlan:
    """Plans a bundle for the target that the configuration was resolved for."""
    check_sizes(checkpoint)
    family = find_family(checkpoint.config)
    changes = choose_changes(config)
    description = changes.apply(checkpoint.description)
    _check_room(changes, checkpoint.description, description)
    _check_float8(checkpoint, description, target)
    sampling = choose_sampling(config)
    computes_chunks = TARGETS[target].computes_chunks(config.padding_side)
    options = {
        PROMPT_LOGPROBS: bool(config.output_prompt_logprobs),
        EMBEDDINGS: bool(config.output_embeddings),
        PROCESSORS: config.processes_logits,
    }
    model = GraphSpec(
        description=description,
        model=family.model,
        dtype=config.torch_dtype,
        tp_degree=config.tp_degree,
        num_slots=config.max_batch_size,
        max_length=config.max_length,
        ctx_batch_size=config.ctx_batch_size,
        tkg_batch_size=config.tkg_batch_size,
        sampling=sampling,
        output_logits=config.output_logits,
        reduce_dtype=config.rpl_reduce_dtype,
        padding_side=config.padding_side,
        returns_internal=TARGETS[target].returns_internal,
        optional_inputs=tuple(flag for flag, is_set in options.items() if is_set),
        reads_context=computes_chunks,
        num_blocks=config.pa_num_blocks if config.is_block_kv_layout else 0,
        block_tokens=config.pa_block_size if config.is_block_kv_layout else 0,
        skips_idle=TARGETS[target].skips_idle,
        largest_step=count_ring_step(config) if TARGETS[target].has_rings else 0,
    )
    weights = plan_weights(
        description, checkpoint, dtype=config.torch_dtype, cast_type=config.cast_type, tp_degree=config.tp_degree
    )
    tokens = read_token_ids(checkpoint.config, checkpoint.generation_config, description.vocab_size)
    return BuildPlan(
        model=model,
        changes=changes,
        weights=weights,
        submodels=tuple(describe_executables(model, config)),
        sampling=sampling,
        limits=Limits(
            max_context_length=config.find_longest_prompt(in_chunks=computes_chunks),
            max_length=config.longest_sequence,
            max_new_tokens=config.max_new_tokens,
            ctx_batch_size=config.ctx_batch_size,
            tkg_batch_size=config.tkg_batch_size,
        ),
        tokens=tokens,
        serving=Serving(
            input_truncation=config.allow_input_truncation,
            skip_warmup=config.skip_warmup,
            prefix_caching=config.is_prefix_caching,
            prompt_lengths=description.prompt_lengths,
            generation=choose_generation_defaults(checkpoint.generation_config, config, tokens, target),
            **_choose_adapter_serving(config.lora_config),
        ),
    )


def _choose_adapter_serving(lora: LoraServingConfig | None) -> dict[str, Any]:
    """What of `Serving` is about adapters; it stays at its defaults if there are none."""
    return {} if lora is None else {"adapter_eviction": lora.eviction_policy, "max_host_adapters": lora.max_cpu_loras}


def _check_room(changes: ModelChanges, own: ModelDescription, description: ModelDescription) -> None:
    """Refuses targets of adapters all of which name nothing."""
    if changes.adapters is None or description.adapter_parameters():
        return
    adaptable = dict.fromkeys(own.find_module(one).rpartition(".")[2] for one in own.linears() if one.is_adaptable)
    accepted = f"some of {', '.join(adaptable)}, or {ALL_LINEAR}: linear layers that adapters may change"
    raise ConfigInvalid([FieldViolation(TARGETS_PATH, ", ".join(changes.adapters.targets), accepted)])


def _check_float8(checkpoint: Checkpoint, description: ModelDescription, target: TargetKind) -> None:
    """Refuses matrices that would stay as the checkpoint has them, with items that the target may misread."""
    misread = {name: one for name, one in checkpoint.packed.items() if may_misread(one, target)}
    for linear, names in find_matrices(description, checkpoint) if misread else ():
        if linear.format and any(name in misread and misread[name].fits(FORMATS[linear.format]) for name in names):
            value = f"'f8e4m3' of a checkpoint whose items of {linear.name} may reach 448; {target}'s end at 240"
            accepted = "'int8' or 'f8e5m2', or quantized false"
            raise ConfigInvalid([FieldViolation("neuron_config.quantization_dtype", value, accepted)])


def may_misread(matrix: PackedMatrix | GgufTensor, target: TargetKind) -> bool:
    """Whether a target may read large items as infinities: NxD's float8 ends at 240, that of others at 448."""
    if isinstance(matrix, GgufTensor):
        return False
    return target in OLD_FLOAT8 and matrix.kept_item == "float8_e4m3fn" and matrix.packing != UNSAID


def choose_changes(config: NeuronConfig) -> ModelChanges:
    """Says what a configuration changes in a model's description."""
    return ModelChanges(
        fuses_qkv=config.fused_qkv,
        splits_vocabulary=config.vocab_parallel,
        attention_dtype=None if config.attention_dtype == config.torch_dtype else config.attention_dtype,
        kept=choose_kept(config),
        quantization=choose_quantization(config, config.modules_to_not_convert or ()),
        adapters=choose_adapters(config),
    )


def choose_adapters(config: NeuronConfig) -> Adapters | None:
    """Says what room a configuration leaves for adapters; None: none."""
    lora = config.lora_config
    if lora is None:
        return None
    return Adapters(slots=AdapterSlots(slots=lora.max_loras, rank=lora.max_lora_rank), targets=lora.target_modules)


def choose_kept(config: NeuronConfig) -> KeptAs | None:
    """Says how caches keep keys and values; None: as they are."""
    chosen = config.kv_quant_config
    if chosen is None:
        return _CAST_KV if config.kv_cache_quant else None
    if chosen.direct_cast:
        return KeptAs(dtype=chosen.quant_dtype)
    methods = (chosen.k_quant_method, chosen.v_quant_method)
    key_scales, value_scales = (_SCALES[method] for method in methods)
    return KeptAs(dtype=chosen.quant_dtype, key_scales=key_scales, value_scales=value_scales)


def choose_quantization(config: NeuronConfig, skipped: Sequence[str]) -> Quantization | None:
    """Says how a configuration quantizes linear layers but for `skipped`; None if it does not.

    The kernel of `quantized_mlp_kernel_enabled` takes quantized matrices of the MLP, whether `quantized` is set or not.
    """
    if not (config.quantized or config.quantized_mlp_kernel_enabled):
        return None
    dtype, kind = config.quantization_dtype, config.quantization_type.removesuffix("_symmetric")
    return Quantization(
        format=dtype if dtype.startswith(INT4) else f"{dtype}_{kind}",
        activations=_choose_activations(config),
        groups=tuple(MemoryGroup) if config.quantized else (MemoryGroup.MLP,),
        skipped=tuple(skipped),
    )


def _choose_activations(config: NeuronConfig) -> str:
    """The row of `ACTIVATION_FORMATS` for what quantized layers multiply; empty if that stays as it is."""
    suffix = {"dynamic": "", "dynamic_whole": "_whole"}.get(config.activation_quantization_type or "none")
    item = "f8e4m3" if config.quantization_dtype == "f8e4m3" else "int8"
    return "" if suffix is None else f"{item}{suffix}"


def describe_executables(model: GraphSpec, config: NeuronConfig) -> Iterator[ExecutableSpec]:
    """Describes the executables of a configuration, in manifest order: those that process logits behind others."""
    for processes in (False, True) if PROCESSORS in model.flags else (False,):
        yield from _describe_executables(model, config, processes=processes)


def _describe_executables(model: GraphSpec, config: NeuronConfig, *, processes: bool) -> Iterator[ExecutableSpec]:
    for shape in describe_submodels(config):
        for bucket in shape.buckets:
            # Validation has refused submodels that are not served.
            if len(bucket) == 1:
                yield describe_submodel(model, shape.name, *bucket, processes=processes)
            elif shape.name == "context_encoding":
                yield describe_submodel(model, shape.name, bucket[0], prefix=bucket[1], processes=processes)
            else:
                yield describe_submodel(
                    model, shape.name, bucket[1], rows=_count_rows(config, bucket[0]), processes=processes
                )


def _count_rows(config: NeuronConfig, number: int) -> int | None:
    """Rows of a token_generation bucket: its first number, unless that is the tokens of a row, with prefix caching."""
    return number if config.token_generation_batches else None
