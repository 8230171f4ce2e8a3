"""The digest of the graph ABI. Bundles with equal digests can exchange weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import rfc8785


class TensorFacts(Protocol):
    """The properties of a weight tensor that enter the digest."""

    @property
    def name(self) -> str:
        """Name in the shard."""

    @property
    def dtype(self) -> str:
        """Name of the dtype, such as `float32`."""

    @property
    def shape(self) -> Sequence[int]:
        """Static shape."""

    @property
    def layout(self) -> str:
        """How the shard arranges its items."""


class ShardFacts(Protocol):
    """The properties of a rank's weight shard that enter the digest; `bundle.manifest.WeightShard` has them."""

    @property
    def rank(self) -> int:
        """Number of the rank."""

    @property
    def tensors(self) -> Sequence[TensorFacts]:
        """All tensors of the shard."""


def compute_graph_abi_digest(
    *,
    graph_digests: Mapping[str, str],
    shards: Iterable[ShardFacts],
    numeric_config: Mapping[str, Any],
    tp_degree: int,
) -> str:
    """Hashes everything that a weight set must fit.

    `graph_digests` has the digest of each exported graph, by executable tag; `numeric_config` every model attribute
    that enters the arithmetic: rope, eps, activations, head counts, …
    """
    abi: dict[str, Any] = {
        "graph_digests": dict(graph_digests),
        "numeric_config": dict(numeric_config),
        "tensors": [
            {"rank": shard.rank, "tensors": [_list_facts(tensor) for tensor in shard.tensors]} for shard in shards
        ],
        "tp_degree": tp_degree,
    }
    return f"sha256:{hashlib.sha256(rfc8785.dumps(abi)).hexdigest()}"


def _list_facts(tensor: TensorFacts) -> list[Any]:
    """Digests from before there were layouts stay: the usual one is left out."""
    return [tensor.name, tensor.dtype, list(tensor.shape), *([] if tensor.layout == "row_major" else [tensor.layout])]
