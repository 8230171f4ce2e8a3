import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from bundle.abi.digest import compute_graph_abi_digest
from bundle.abi.inputs import INPUTS, inputs_of
from bundle.abi.outputs import INVALID_ROW, NO_TOKEN, OUTPUTS, list_flags, outputs_of, split_tokens
from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import Symbols
from bundle.digest import is_digest, sha256_bytes
from bundle.manifest import TensorSpec, WeightShard, WeightTensor

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


SYMBOLS: Symbols = {
    "R": 2,
    "T": 4,
    "K": 1,
    "N": 3,
    "V": 50,
    "rank_V": 25,
    "W": 2,
    "B": 3,
    "pad_id": 3,
    "scratch_slot": 6,
    "scratch_block": 9,
    "scratch_place": 144,
    "last_place": 159,
    "last_token_id": 49,
    "last_position": 63,
    "last_adapter": 4,
}


@pytest.mark.parametrize("name", INPUTS)
def test_idle_values_fill_the_input_and_are_accepted(name: str) -> None:
    row = INPUTS[name]
    values = row.idle_values(row.shape(SYMBOLS), SYMBOLS)
    accepted = row.accepted_values(SYMBOLS)
    assert len(values) == math.prod(row.shape(SYMBOLS))
    assert accepted is None or all(value in accepted for value in values)
    assert {type(value) for value in values} == {{"int32": int, "float32": float}[row.dtype]}


def test_idle_rows_are_greedy_in_the_scratch_slot_and_the_scratch_block() -> None:
    idle = {name: row.idle_values(row.shape(SYMBOLS), SYMBOLS) for name, row in INPUTS.items()}
    assert idle == {
        "input_ids": [3] * 8,
        "position_ids": [0] * 8,
        "seq_ids": [6, 6],
        "slot_mapping": [144] * 8,
        "active_block_table": [9] * 6,
        "num_tokens": [1, 1],
        "computed_context_lens": [0, 0],
        "prompt_lens": [0, 0],
        "next_ids": [3] * 8,
        "live_rows": [0],
        "adapter_ids": [-1, -1],
        "sampling_params": [1.0] * 6,
        "noise_keys": [0, 0, 0, 0],
        "rand": [0.5, 0.5],
        "token_bitmask": [-1] * 4,
        "pair_ids": [-1] * 6,
        "pair_bias": [0.0] * 6,
        "pair_factor": [1.0] * 6,
        "pair_penalty": [0.0] * 6,
        "cuts": [0.0, 1.0, 0.0, 1.0],
    }


BLOCKS = ("block_kv", "computed_context", "live_rows")


@pytest.mark.parametrize(
    ("submodel", "flags", "names"),
    [
        ("context_encoding", (), "seq_ids num_tokens"),
        ("token_generation", (), "seq_ids"),
        ("token_generation", ("rand", "tokens"), "seq_ids rand"),
        ("token_generation", ("adapters", "rand", "tokens"), "seq_ids adapter_ids rand"),
        ("context_encoding", BLOCKS, "slot_mapping active_block_table num_tokens computed_context_lens live_rows"),
        ("token_generation", BLOCKS, "slot_mapping active_block_table live_rows"),
        ("speculation", ("noise_keys", "sampling_params"), "seq_ids num_tokens sampling_params noise_keys"),
    ],
)
def test_inputs_of_a_submodel_come_in_calling_order(submodel: SubmodelName, flags: tuple[str, ...], names: str) -> None:
    assert [row.name for row in inputs_of(submodel, flags)] == ["input_ids", "position_ids", *names.split()]


def test_outputs_are_those_of_the_flags() -> None:
    assert [row.name for row in outputs_of("context_encoding", ("logits", "tokens", "rand"))] == ["tokens", "logits"]
    assert outputs_of("token_generation", ()) == ()


def test_internal_outputs_are_no_others() -> None:
    """What a deployment offers goes by the flags of outputs that are not internal."""
    assert [name for name, row in OUTPUTS.items() if row.is_internal] == ["rank_logits"]
    (row,) = outputs_of("token_generation", ("rank_logits",))
    spec = TensorSpec.of(row, SYMBOLS, computed="bfloat16")
    assert (spec.dtype, spec.shape) == ("bfloat16", (2, 25))
    assert TensorSpec.of(OUTPUTS["logits"], SYMBOLS, computed="bfloat16").dtype == "float32"


def test_outputs_of_one_token_a_row_have_no_axis_for_it() -> None:
    assert OUTPUTS["tokens"].shape(SYMBOLS) == (2,)
    assert OUTPUTS["logits"].shape(SYMBOLS) == (2, 50)
    several = {**SYMBOLS, "K": 4}
    assert OUTPUTS["tokens"].shape(several) == (2, 4)
    assert OUTPUTS["logits"].shape(several) == (2, 4, 50)


def test_every_flag_of_v0_1_is_known() -> None:
    assert list_flags() >= {"left_padded", "logits", "rand", "sampling_params", "tokens"}


def test_two_submodels_are_served() -> None:
    assert [name for name, row in SUBMODELS.items() if row.is_served] == ["context_encoding", "token_generation"]
    assert [name for name, row in SUBMODELS.items() if not row.reads_cache] == ["context_encoding"]


@pytest.mark.parametrize(
    ("values", "tokens", "invalid"),
    [
        ([5, 0, 9], [[5], [0], [9]], ()),
        ([5, INVALID_ROW, NO_TOKEN], [[5], [], []], (1,)),
        ([5, 6, 7, NO_TOKEN, NO_TOKEN, NO_TOKEN], [[5, 6], [7], []], ()),
        ([INVALID_ROW, 6, 7, 8, 9, NO_TOKEN], [[], [7, 8], [9]], (0,)),
    ],
)
def test_tokens_of_three_rows(values: list[int], tokens: list[list[int]], invalid: tuple[int, ...]) -> None:
    assert split_tokens(values, 3) == (tokens, invalid)


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
            for field in ({"name": "x"}, {"dtype": "bfloat16"}, {"shape": (4,)}, {"layout": "of a later release"})
        ),
    ],
)
def test_whatever_the_graphs_depend_on_changes_the_digest(change: dict[str, Any]) -> None:
    assert compute_graph_abi_digest(**{**ARGUMENTS, **change}) != compute_graph_abi_digest(**ARGUMENTS)
