from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from bundle.abi.digest import compute_graph_abi_digest
from bundle.abi.state import state_names
from bundle.digest import is_digest, sha256_bytes
from bundle.manifest import WeightShard, WeightTensor

SHARD = WeightShard(
    rank=0,
    blob=sha256_bytes(b"weights"),
    size_bytes=7,
    tensors=(WeightTensor(name="norm.weight", dtype="float32", shape=(8,)),),
)
ARGUMENTS: Mapping[str, Any] = {
    "graph_digests": {"context_encoding_8": sha256_bytes(b"a"), "token_generation_8": sha256_bytes(b"b")},
    "shards": [SHARD],
    "numeric_config": {"rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    "tp_degree": 1,
}
TENSOR = SHARD.tensors[0]


def test_state_is_keys_and_values_layer_by_layer() -> None:
    assert state_names(2) == ("k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1")


def test_other_weights_of_the_same_shape_have_the_same_digest() -> None:
    digest = compute_graph_abi_digest(**ARGUMENTS)
    assert is_digest(digest)
    other = msgspec.structs.replace(SHARD, blob=sha256_bytes(b"fine-tune"), size_bytes=9)
    reordered = {name: dict(reversed(value.items())) for name, value in ARGUMENTS.items() if isinstance(value, dict)}
    assert compute_graph_abi_digest(**{**ARGUMENTS, **reordered, "shards": [other]}) == digest


@pytest.mark.parametrize(
    "change",
    [
        {"tp_degree": 2},
        {"numeric_config": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}},
        {"graph_digests": {"context_encoding_8": sha256_bytes(b"a")}},
        {"shards": [msgspec.structs.replace(SHARD, rank=1)]},
        *(
            {"shards": [msgspec.structs.replace(SHARD, tensors=(msgspec.structs.replace(TENSOR, **field),))]}
            for field in ({"name": "x"}, {"dtype": "bfloat16"}, {"shape": (4,)})
        ),
    ],
)
def test_whatever_the_graphs_depend_on_changes_the_digest(change: dict[str, Any]) -> None:
    assert compute_graph_abi_digest(**{**ARGUMENTS, **change}) != compute_graph_abi_digest(**ARGUMENTS)
