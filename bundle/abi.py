"""The executable ABI: names, order and meaning of what crosses an executable's border.

Every input is int32 unless said. C = ctx_batch_size, B = tkg_batch_size, T = context_encoding bucket, V = vocabulary
size.

context_encoding
    input_ids [C, T], position_ids [C, T]   padding positions hold the pad id and any position
    seq_ids [C]                             KV slot that the row writes; the scratch slot for an idle row
    num_tokens [C]                          valid tokens; outputs are of the last one; padding never writes KV. They are
                                            the first of a row, or with the flag `left_padded` the last
token_generation
    input_ids [B, 1], position_ids [B, 1]   the newest token and its position; its bucket must exceed the position
    seq_ids [B]                             row r reads slot r; `seq_ids[r]` is r, or the scratch slot for an idle row
both, where the flag of the same name is set
    sampling_params f32 [C | B, 3]          top_k, top_p, temperature
    rand f32 [C | B, 1]                     uniform in [0, 1)
outputs, where the flag of the same name is set
    tokens [C | B]
    logits f32 [C | B, V]
state, per layer
    k_cache.{layer}, v_cache.{layer}        [num_slots + 1, KV heads of the rank, max_length, head_dim]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import rfc8785

from bundle.manifest import WeightShard


def state_names(num_layers: int) -> tuple[str, ...]:
    """Names of the KV cache tensors in calling order: k and v of layer 0, of layer 1, …"""
    return tuple(f"{kind}_cache.{layer}" for layer in range(num_layers) for kind in ("k", "v"))


def compute_graph_abi_digest(
    *,
    graph_digests: Mapping[str, str],
    shards: Iterable[WeightShard],
    numeric_config: Mapping[str, Any],
    tp_degree: int,
) -> str:
    """Hashes all that a weight set must fit, so that equal digests mean interchangeable weights.

    Args:
        graph_digests: Digest of the exported graph, by executable tag.
        shards: Weight shards of every rank; only names, dtypes and shapes count.
        numeric_config: Every model attribute that enters the arithmetic: rope, eps, activations, head counts, …
        tp_degree: Number of ranks.

    Returns:
        `sha256:` and 64 hexadecimal digits.
    """
    abi: dict[str, Any] = {
        "graph_digests": dict(graph_digests),
        "numeric_config": dict(numeric_config),
        "tensors": [
            {"rank": shard.rank, "tensors": [[t.name, t.dtype, list(t.shape)] for t in shard.tensors]}
            for shard in shards
        ],
        "tp_degree": tp_degree,
    }
    return f"sha256:{hashlib.sha256(rfc8785.dumps(abi)).hexdigest()}"
