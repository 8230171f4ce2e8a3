"""Metaneffs that a caller by the ABI could not use."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from bundle.abi.neff import NeffInput, NeffOutput
from bundle.manifest import TensorSpec
from compiler_svc.lower.neuron.submodel import Submodel
from compiler_svc.lower.neuron.tensor_map import TensorMap, map_tensors

IDS = TensorSpec(name="input_ids", dtype="int32", shape=(1, 4))
LOGITS = TensorSpec(name="logits", dtype="float32", shape=(1, 9))
CACHE = TensorSpec(name="k_cache.0", dtype="bfloat16", shape=(2, 3))
SUBMODEL = Submodel(
    module=nn.Identity(),
    examples={},
    inputs=(IDS,),
    outputs=(LOGITS,),
    state=(CACHE,),
    weights=frozenset({"lm_head.weight"}),
)


def tensor(kind: int, name: str, data_type: int, *shape: int) -> Any:
    keys = {"user_input_key": b"", "checkpoint_key": b""}
    keys["user_input_key" if kind == 1 else "checkpoint_key"] = name.encode()
    return SimpleNamespace(type=kind, data_type=data_type, shape=shape, **keys)


def read(inputs: list[Any], outputs: list[Any], aliases: dict[int, int], submodel: Submodel = SUBMODEL) -> TensorMap:
    metaneff = SimpleNamespace(input_tensors=inputs, output_tensors=outputs, output_aliases_to=aliases)
    return map_tensors(metaneff, submodel)


INPUTS = [tensor(1, "input_ids", 2, 1, 4), tensor(2, "k_cache.0", 14, 2, 3), tensor(3, "lm_head.weight", 1, 9, 2)]
OUTPUTS = [tensor(0, "", 1, 1, 9), tensor(0, "", 14, 2, 3)]


@pytest.mark.parametrize("state_first", [False, True])
def test_what_is_whose(*, state_first: bool) -> None:
    outputs, aliases = (OUTPUTS[::-1], {0: 1}) if state_first else (OUTPUTS, {1: 1})
    found = read(INPUTS, outputs, aliases)
    assert found.mistakes == ()
    assert found.inputs == (
        NeffInput(name="input0", kind="input", tensor="input_ids", dtype="int32", shape=(1, 4)),
        NeffInput(name="input1", kind="state", tensor="k_cache.0", dtype="bfloat16", shape=(2, 3)),
        NeffInput(name="input2", kind="weight", tensor="lm_head.weight", dtype="float32", shape=(9, 2)),
    )
    logits, cache = sorted(found.outputs, key=lambda one: one.kind)
    place = int(state_first)
    assert logits == NeffOutput(name=f"output{place}", kind="output", tensor="logits", dtype="float32", shape=(1, 9))
    assert (cache.name, cache.tensor, cache.alias) == (f"output{1 - place}", "k_cache.0", "input1")


@pytest.mark.parametrize("kind", [2, 3])
def test_state_that_other_graphs_write(kind: int) -> None:
    inputs = [INPUTS[0], tensor(kind, "k_cache.0", 14, 2, 3), INPUTS[2]]
    found = read(inputs, OUTPUTS[:1], {}, replace(SUBMODEL, reads=frozenset({"k_cache.0"})))
    assert found.mistakes == ()
    assert [(one.kind, one.tensor) for one in found.inputs[1:]] == [
        ("state", "k_cache.0"),
        ("weight", "lm_head.weight"),
    ]
    assert [one.kind for one in found.outputs] == ["output"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "aliases", "mistake"),
    [
        (INPUTS[1:], OUTPUTS, {1: 0}, "input input_ids is missing"),
        ([INPUTS[0], INPUTS[2]], OUTPUTS[:1], {}, "buffer k_cache.0 is missing"),
        (INPUTS, OUTPUTS[:1], {}, "buffer k_cache.0 is no alias"),
        (INPUTS, OUTPUTS, {}, "output1 has data type 14 and is no output of the submodel"),
        (INPUTS, OUTPUTS[1:], {0: 1}, "output logits is missing"),
        ([*INPUTS, tensor(1, "seq_ids", 2, 1)], OUTPUTS, {1: 1}, "input 'seq_ids' is none of the submodel's"),
        ([*INPUTS, tensor(3, "spare", 1, 1)], OUTPUTS, {1: 1}, "weight 'spare' is in no shard"),
        ([*INPUTS, tensor(4, "spare", 1, 1)], OUTPUTS, {1: 1}, "input3 'spare' has type 4 and data type 1"),
        ([*INPUTS, tensor(3, "lm_head.weight", 10, 1)], OUTPUTS, {1: 1}, "has type 3 and data type 10"),
        ([tensor(1, "input_ids", 2, 1, 8), *INPUTS[1:]], OUTPUTS, {1: 1}, "is int32 [1, 8]; accepted: int32 [1, 4]"),
        ([tensor(1, "input_ids", 1, 1, 4), *INPUTS[1:]], OUTPUTS, {1: 1}, "is float32 [1, 4]; accepted: int32 [1, 4]"),
    ],
)
def test_mistakes(inputs: list[Any], outputs: list[Any], aliases: dict[int, int], mistake: str) -> None:
    assert mistake in "; ".join(read(inputs, outputs, aliases).mistakes)
