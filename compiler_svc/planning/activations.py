"""Bytes that one step of an executable needs in one rank, besides weights and KV cache.

For R rows with T active tokens, N = R * T; H is the hidden size, I the rank's intermediate size, V the vocabulary and
V' the rank's part of it, q and kv the rank's query and KV heads of D dimensions, b the bytes of an item:

    stream     2 N H b                      the residual, and the sum that replaces it
    attention  N H b + N D (2q + 2kv) b     normalized input; queries, keys, values, result
               + R q T L (4 + b)            scores over L positions, unless a kernel fuses them: f32, and cast
    mlp        2 N H b + 2 N I b            normalized input, output; gate and up, or up before and after its activation
    logits     M (H b + V' b + 8 V)         for the M tokens with logits: whole logits in f32, twice
                                            (of prompts that are told of, for those that are told of at a time)
    state      the KV cache once more       only for cpu at -O0, whose graphs return a new cache

A layer's attention and MLP never run at the same time, nor do layers and the head. So a step needs

    stream + max(attention, mlp, logits) + state

With sequence parallelism, ranks divide the stream of prompts. If the configuration sets the size of scratchpad pages,
a scratchpad takes whole pages. A rank runs one executable at a time, so the largest step counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bundle.abi.submodels import SUBMODELS
from compiler_svc.config import NeuronConfig
from compiler_svc.config.submodels import SubmodelShape, count_row_tokens
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.divisions import share_of
from compiler_svc.models.size_limits import MAX_TOLD_LOGITS
from compiler_svc.models.specs import LayerSpec
from compiler_svc.planning.weights import item_bytes_of

_LOGIT_BYTES: Final = 4
_MIB: Final = 1 << 20


def measure_activations(model: ModelDescription, config: NeuronConfig, submodels: Sequence[SubmodelShape]) -> int:
    """Measures the largest step of all executables, in bytes, without a second cache."""
    largest = max(_measure_step(model, config, submodel) for submodel in submodels)
    if config.scratchpad_page_size:
        page_bytes = config.scratchpad_page_size * _MIB
        return -(-largest // page_bytes) * page_bytes
    return largest


def _measure_step(model: ModelDescription, config: NeuronConfig, submodel: SubmodelShape) -> int:
    row = SUBMODELS[submodel.name]
    rows, tokens, positions = _find_largest_step(config, submodel)
    item = item_bytes_of(config.torch_dtype)
    hidden = rows * tokens * model.hidden_size * item

    stream = 2 * hidden
    if row.computes_prompts and config.sequence_parallel_enabled:
        stream = share_of(stream, config.tp_degree)

    def measure_attention(layer: LayerSpec) -> int:
        heads = layer.attention.heads
        layout = heads.layout(config.tp_degree)
        taken = rows * tokens * heads.head_dim * 2 * (layout.num_query_heads + layout.num_kv_heads) * item
        if config.attn_kernel_enabled is False:
            taken += rows * layout.num_query_heads * tokens * positions * (_LOGIT_BYTES + item)
        return hidden + taken

    def measure_mlp(layer: LayerSpec) -> int:
        return 2 * hidden + 2 * rows * tokens * layer.feed_forward.up.outputs.part_length(config.tp_degree) * item

    # A model has few kinds of layers, however many layers it has.
    attention = max(map(measure_attention, model.layers))
    mlp = max(map(measure_mlp, model.layers))
    asked = rows * tokens if row.outputs == "all" else rows
    if row.computes_prompts and config.output_prompt_logprobs:
        asked = max(rows, min(rows * tokens, MAX_TOLD_LOGITS // model.vocab_size))
    vocab_share = share_of(model.vocab_size, config.tp_degree)
    logits = asked * ((model.hidden_size + vocab_share) * item + 2 * _LOGIT_BYTES * model.vocab_size)
    return stream + max(attention, mlp, logits)


def _find_largest_step(config: NeuronConfig, submodel: SubmodelShape) -> tuple[int, int, int]:
    """Number of rows, active tokens of each row, and positions that each token attends to."""
    # Buckets with two numbers contain every pair, so the last bucket has the largest value of both.
    bucket = max(submodel.buckets)
    positions = sum(bucket) if SUBMODELS[submodel.name].computes_prompts else bucket[-1]
    return submodel.batch_size, count_row_tokens(config, submodel), positions
