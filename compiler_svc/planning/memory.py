"""Predicts the memory of one rank for a configuration, part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from bundle.abi.formats import measure_kept
from compiler_svc.config import InferenceConfig, NeuronConfig
from compiler_svc.config.submodels import count_ring_step, describe_submodels
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.state import StateSpec
from compiler_svc.models.transforms import ModelChanges
from compiler_svc.planning.activations import measure_activations
from compiler_svc.planning.build_plan import choose_changes, choose_quantization
from compiler_svc.planning.weights import (
    item_bytes_of,
    measure_adapters,
    measure_draft_weights,
    measure_medusa_heads,
    measure_room,
    measure_weights,
)
from compiler_svc.sharding.plan import WeightPlan, plan_weights
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.headers import TensorHeader
from targets.cpu import CPU
from targets.target import Target

# Only `cast_type` "as-declared" uses it.
_DTYPE_OF_PICKLES: Final = "bfloat16"
_FLASH_DECODING_SPARE: Final = 128
#: Blocks, slots, or positions of a slot, that no sequence has: idle rows and padding write there.
_NUM_SCRATCH: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank; all ranks need the same. Activations are those of the largest step; code is estimated.

    Weights are measured by group, and but for those of a draft by what they are kept as, which is a dtype or the title
    of a format; keys and values by dtype.
    """

    weight_groups: Mapping[str, int]
    kept_weights: Mapping[str, int]
    kept_kv: Mapping[str, int]
    activation_bytes: int
    code_bytes: int
    lora_bytes: int

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weight groups."""
        return sum(self.weight_groups.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(self.kept_kv.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that the rank holds."""
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + self.code_bytes + self.lora_bytes


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A checkpoint and its `config.json`, with the configuration's overrides applied."""

    checkpoint: Checkpoint
    description: ModelDescription


def read_model(checkpoint: Checkpoint) -> PlannedModel:
    """Reads from a checkpoint what a plan needs. Leaves a pickled checkpoint closed and assumes that it has the tensors
    that its configuration implies.
    """
    description = checkpoint.description
    if checkpoint.is_pickled:
        file = checkpoint.files[0]
        tensors = {
            name: TensorHeader(name, _DTYPE_OF_PICKLES, shape, file)
            for name, shape in description.checkpoint_tensors().items()
        }
        checkpoint = replace(checkpoint, tensors=tensors)
    return PlannedModel(checkpoint, description)


class MemoryModel:
    """Predicts memory for configurations of one model. Plans weights once for each way to shard them."""

    def __init__(
        self,
        model: PlannedModel,
        draft: PlannedModel | None,
        target: Target,
        optimization_level: int,
    ) -> None:
        self._model = model
        self._draft = draft
        self._format = target.lowerings[optimization_level].format
        self._target = target
        self._descriptions: dict[ModelChanges, ModelDescription] = {}
        self._weights: dict[tuple[object, ...], tuple[Mapping[str, int], Mapping[str, int]]] = {}

    def measure(self, config: InferenceConfig) -> RankMemory:
        """Measures the memory of a rank."""
        neuron, model = config.neuron_config, self._model.description
        kept_kv = self._measure_kv(model, neuron)
        submodels = describe_submodels(neuron)
        activation_bytes = measure_activations(model, neuron, submodels)
        num_layers = len(model.layers)
        if self._draft is not None:
            # One executable holds the steps of both models, which run one after the other.
            draft = draft_config(config)
            kept_kv += self._measure_kv(self._draft.description, draft)
            activation_bytes = max(activation_bytes, measure_activations(self._draft.description, draft, submodels))
            num_layers += len(self._draft.description.layers)
        # Executables with equal graphs are one file, which a rank loads once.
        num_files = sum(submodel.count_graphs(skips_idle=self._target.skips_idle) for submodel in submodels)
        weight_groups, kept_weights = self._measure_weights(config)
        is_copied = self._format.state_convention == "functional"
        return RankMemory(
            weight_groups=weight_groups,
            kept_weights=kept_weights,
            kept_kv=kept_kv,
            activation_bytes=activation_bytes + (kept_kv.total() if is_copied else 0),
            code_bytes=num_files * (self._format.fixed_code_bytes + self._format.layer_code_bytes * num_layers),
            lora_bytes=self._measure_adapters(neuron),
        )

    def _measure_adapters(self, neuron: NeuronConfig) -> int:
        """Measures what executors make, or, for Neuron, what NxD Inference's documents count."""
        changes = choose_changes(neuron)
        if changes.adapters is None:
            return 0
        if self._target is not CPU:
            return measure_adapters(self._model.description, neuron, changes.adapters)
        return measure_room(self._describe(changes), neuron)

    def _measure_kv(self, model: ModelDescription, config: NeuronConfig) -> Counter[str]:
        return measure_kv(model, config, self._target)

    def _measure_weights(self, config: InferenceConfig) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Measures groups, and what is kept in each way."""
        neuron = config.neuron_config
        changes = choose_changes(neuron)
        key = (neuron.tp_degree, neuron.torch_dtype, neuron.cast_type, changes)
        if key not in self._weights:
            description = self._describe(changes)
            plan = self._plan_weights(description, neuron)
            groups = measure_weights(plan) | {"draft": self._measure_draft(config)}
            kept = measure_kept((one.name, one.dtype, one.rank_shape) for one in plan.tensors)
            self._weights[key] = groups, kept
        return self._weights[key]

    def _describe(self, changes: ModelChanges) -> ModelDescription:
        if changes not in self._descriptions:
            self._descriptions[changes] = changes.apply(self._model.description)
        return self._descriptions[changes]

    def _plan_weights(self, description: ModelDescription, neuron: NeuronConfig) -> WeightPlan:
        return plan_weights(
            description,
            self._model.checkpoint,
            dtype=neuron.torch_dtype,
            cast_type=neuron.cast_type,
            tp_degree=neuron.tp_degree,
        )

    def _measure_draft(self, config: InferenceConfig) -> int:
        neuron = config.neuron_config
        item_bytes = item_bytes_of(neuron.torch_dtype)
        if neuron.is_medusa:
            heads = neuron.num_medusa_heads
            model = self._model.description
            return measure_medusa_heads(model, heads, item_bytes=item_bytes, tp_degree=neuron.tp_degree)
        if self._draft is None:
            return 0
        draft = draft_config(config)
        skipped = neuron.draft_model_modules_to_not_convert or draft.modules_to_not_convert or ()
        # NxD Inference quantizes a draft model, and changes nothing else in it.
        changes = ModelChanges(quantization=choose_quantization(draft, skipped))
        return measure_draft_weights(
            self._draft.checkpoint.tensors,
            changes.apply(self._draft.description),
            item_bytes=item_bytes_of(draft.torch_dtype),
            tp_degree=neuron.tp_degree,
        )


def draft_config(config: InferenceConfig) -> NeuronConfig:
    """The draft model's options: the target model's sizes, with the draft model's own dtypes if it has some."""
    target, fused = config.neuron_config, config.fused_spec_config
    if fused is None or fused.draft_config is None:
        return target
    draft = fused.draft_config.neuron_config
    return replace(
        target,
        torch_dtype=draft.torch_dtype,
        attention_dtype=draft.attention_dtype,
        quantized=draft.quantized,
        quantized_mlp_kernel_enabled=draft.quantized_mlp_kernel_enabled,
        quantization_type=draft.quantization_type,
        kv_cache_quant=draft.kv_cache_quant,
        kv_quant_config=draft.kv_quant_config,
        modules_to_not_convert=draft.modules_to_not_convert,
    )


def measure_kv(model: ModelDescription, config: NeuronConfig, target: Target) -> Counter[str]:
    """Measures the KV cache of one rank by dtype, in bytes; all ranks need the same.

        slots:   max_batch_size * (positions + 1); where code skips idle rows, (max_batch_size + 1) * positions
        blocks:  (pa_num_blocks + 1 scratch block) * pa_block_size
        each position: over the layers and their rows, rank's KV heads * items of the row * bytes of an item

    Positions are `max_length`, or those of a layer's ring if the target has rings. With flash decoding, the ranks that
    share a KV head divide them, and each rank has 128 more positions for writes that are discarded, as in NxD
    Inference.
    """
    states = map(choose_changes(config).change_state, model.states)
    kept: Counter[str] = Counter()
    for state in states:
        num_places = _count_positions(state, config, target) * state.heads.layout(config.tp_degree).num_kv_heads
        for row in state.rows(config.torch_dtype):
            kept[row.dtype] += num_places * row.size * item_bytes_of(row.dtype)
    # Without hidden states, no bytes are no row.
    return kept + Counter({config.torch_dtype: _measure_hidden_states(model, config)})


def _count_positions(state: StateSpec, config: NeuronConfig, target: Target) -> int:
    """Counts the positions for which a rank keeps a layer's keys and values."""
    if config.is_block_kv_layout:
        return (config.pa_num_blocks + _NUM_SCRATCH) * config.pa_block_size
    positions = _row_positions(state, config, count_ring_step(config) if target.has_rings else 0)
    if target.skips_idle:
        return (config.max_batch_size + _NUM_SCRATCH) * positions
    return config.max_batch_size * (positions + _NUM_SCRATCH)


def _row_positions(state: StateSpec, config: NeuronConfig, ring_step: int) -> int:
    group = min(config.tp_degree, state.heads.num_query_heads) // state.heads.num_kv_heads
    if not config.flash_decoding_enabled or group <= 1:
        return state.count_positions(config.max_length, ring_step)
    return -(-config.max_length // group) + _FLASH_DECODING_SPARE


def _measure_hidden_states(model: ModelDescription, config: NeuronConfig) -> int:
    """Measures EAGLE's ring of the target's hidden states: two speculations for each row and a scratch row."""
    if not config.enable_eagle_speculation:
        return 0
    rows = config.max_batch_size + 1
    return rows * 2 * config.speculation_length * model.hidden_size * item_bytes_of(config.torch_dtype)
