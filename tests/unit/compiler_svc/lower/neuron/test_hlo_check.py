"""Each rule has a graph that breaks it, and one beside it that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bundle.manifest import TargetKind
from compiler_svc.lower.neuron.hlo import drop_sources, read_hlo
from compiler_svc.lower.neuron.hlo_check import RULES, Finding, check_hlo
from compiler_svc.lower.neuron.wire import MessageInvalid
from tests.neuron.hlo_modules import SOURCE, Array, Module, Op

F32 = Array("f32", (2, 8))
REPLACE = [Op("parameter", Array("s32")), Op("parameter", Array("s32"), parameter=1)]
SORT = Op("sort", (F32, Array("s32", (2, 8))))
ADD = [*REPLACE, Op("add", Array("s32"), operands=(201, 202))]


def find(
    op: Op, *taken: Array, called: list[Op] | None = None, target: TargetKind = "trn2", memory_bytes: int | None = None
) -> tuple[Finding, ...]:
    """What is found in a graph of one operation on parameters of these shapes."""
    parameters = [Op("parameter", shape, parameter=place) for place, shape in enumerate(taken)]
    op = replace(op, operands=tuple(range(101, 101 + len(taken))), called=(2,) if called else ())
    module = Module([[*parameters, op], *([called] if called else [])])
    return check_hlo(read_hlo(module.encode()), target=target, memory_bytes=memory_bytes)


BROKEN = [
    ("NCC_EMOD025", Op("add", Array("f32", (8,), is_dynamic=True)), (F32,), None),
    ("NCC_ESPP004", Op("convert", Array("f64", (2,))), (F32,), None),
    ("NCC_ESPP004", Op("while", (Array("f32"), Array("f64"))), (F32,), None),
    ("NCC_EVRF004", Op("fft", Array("c64", (2,))), (F32,), None),
    ("NCC_EVRF005", Op("convert", Array("f8e4m3fnuz", (2,))), (F32,), None),
    ("NCC_EVRF051", Op("add", Array("f8e4m3fn", (2,))), (Array("f8e4m3fn", (2,)),) * 2, None),
    ("NCC_EVRF006", Op("rng-bit-generator", Array("u32", (2,)), rng_algorithm=2), (F32,), None),
    ("NCC_EVRF013", Op("topk", Array("s32", (3, 5))), (Array("s32", (3, 2048)),), None),
    ("NCC_EVRF013", Op("custom-call", Array("s32", (3, 5)), target="AwsNeuronTopK"), (Array("s32", (3, 9)),), None),
    ("NCC_EVRF015", Op("custom-call", F32, target="cu_threefry2x32"), (F32,), None),
    ("NCC_EVRF016", Op("scatter", Array("s32", (8,))), (Array("s32", (8,)), Array("s32"), Array("s32")), ADD),
    ("NCC_EVRF019", Op("reduce-window", F32), (F32, F32, Array("f32"), Array("f32")), None),
    ("NCC_EVRF022", Op("shift-right-arithmetic", Array("s64", (2,))), (Array("s64", (2,)), Array("s64", (2,))), None),
    ("NCC_EVRF029", SORT, (F32, Array("s32", (2, 8))), None),
    ("NCC_EVRF035", Op("dot", Array("s32", (2, 2))), (Array("s32", (2, 8)), Array("s32", (8, 2))), None),
    ("NCC_EVRF061", Op("all-reduce", Array("s32", (2,))), (Array("s32", (2,)),), None),
    ("NCC_EVRF062", Op("power", Array("s64", (2,))), (Array("s64", (2,)), Array("s64", (2,))), None),
    ("NCC_EVRF063", Op("reduce-scatter", Array("s64", (2,))), (Array("s64", (4,)),), None),
    ("NCC_ESFH002", Op("constant", Array("u64"), u64s=(1 << 32,)), (), None),
]

ACCEPTED = [
    (Op("convert", Array("f32", (2,))), (Array("bf16", (2,)),), None),
    (Op("convert", Array("f8e5m2", (2,))), (F32,), None),
    # Items of weights are no larger than what the target has.
    (Op("transpose", Array("f8e4m3fn", (8, 2))), (Array("f8e4m3fn", (2, 8)),), None),
    (Op("convert", F32), (Array("f8e4m3fn", (2, 8)),), None),
    (Op("convert", Array("f8e4m3fn", (2,))), (F32,), None),
    (Op("rng-bit-generator", Array("u32", (2,))), (F32,), None),
    (Op("custom-call", Array("s32", (3,)), target="AwsNeuronArgMax"), (F32,), None),
    (Op("custom-call", (F32, F32), target="AwsNeuronTopK"), (F32,), None),
    # It writes integers where they belong, and adds none.
    (Op("scatter", Array("s32", (8,))), (Array("s32", (8,)), Array("s32"), Array("s32")), REPLACE),
    (Op("scatter", F32), (F32, Array("s32"), F32), ADD),
    (Op("reduce-window", F32), (F32, Array("f32")), None),
    (Op("shift-right-arithmetic", Array("s32", (2,))), (Array("s32", (2,)), Array("s32", (2,))), None),
    (Op("dot", Array("f32", (2, 2))), (F32, Array("f32", (8, 2))), None),
    (Op("all-reduce", F32), (F32,), None),
    # It adds nothing.
    (Op("all-gather", Array("s32", (4,))), (Array("s32", (2,)),), None),
    (Op("power", F32), (F32, F32), None),
    (Op("constant", Array("u64"), u64s=((1 << 32) - 1,)), (), None),
]


@pytest.mark.parametrize(("code", "op", "taken", "called"), BROKEN, ids=lambda value: getattr(value, "opcode", None))
def test_a_graph_that_breaks_the_rule(code: str, op: Op, taken: tuple[Array, ...], called: list[Op] | None) -> None:
    assert [one.code for one in find(op, *taken, called=called)] == [code]


@pytest.mark.parametrize(("op", "taken", "called"), ACCEPTED, ids=lambda value: getattr(value, "opcode", None))
def test_a_graph_that_keeps_every_rule(op: Op, taken: tuple[Array, ...], called: list[Op] | None) -> None:
    assert find(op, *taken, called=called) == ()


def test_every_rule_has_a_graph() -> None:
    assert {rule.code for rule in RULES} == {code for code, *_ in BROKEN}


def test_float8_is_a_matter_of_the_target() -> None:
    assert find(Op("add", Array("f8e4m3fn", (2,))), F32, target="trn3") == ()


@pytest.mark.parametrize(
    ("target", "codes"), [("trn1", []), ("inf2", []), ("trn2", ["NCC_EVRF029"]), ("trn3", ["NCC_EVRF029"])]
)
def test_a_sort_is_a_matter_of_the_target(target: TargetKind, codes: list[str]) -> None:
    assert [one.code for one in find(SORT, F32, Array("s32", (2, 8)), target=target)] == codes
    integers = Array("s64", (3, 9))
    assert [one.code for one in find(Op("sort", integers), integers, target=target)] == ["NCC_EVRF013", *codes]


def test_an_operation_inside_of_another_counts() -> None:
    inner = [Op("parameter", Array("f32")), Op("convert", Array("f64"), operands=(201,))]
    (found,) = find(Op("reduce", Array("f32")), F32, called=inner)
    assert (found.code, found.operation) == ("NCC_ESPP004", "convert convert.202 of f64[]")


def test_a_finding_names_the_operation_and_our_line() -> None:
    source = ("/somewhere/sources/compiler_svc/models/layers/logits.py", 97)
    (found,) = find(Op("topk", Array("s64", (3, 9)), source=source), Array("s64", (3, 9)))
    assert str(found) == (
        "NCC_EVRF013: topk topk.102 of s64[3,9] at compiler_svc/models/layers/logits.py:97; accepted: floating-point "
        "keys"
    )


@pytest.mark.parametrize("file", ["", "/usr/lib/python3.11/site-packages/torch/nn/functional.py"])
def test_a_line_of_others_is_none_of_ours(file: str) -> None:
    (found,) = find(Op("fft", Array("c64"), source=(file, 3)), F32)
    assert found.source == ""


def test_an_input_that_the_graph_does_not_use() -> None:
    module = Module([[Op("parameter", F32), Op("parameter", F32, parameter=1), Op("negate", F32, operands=(101,))]])
    (found,) = check_hlo(read_hlo(module.encode()), target="trn2", memory_bytes=None)
    assert str(found) == "parameter parameter.102 of f32[2,8]; accepted: an input that the graph uses"


def test_tensors_beyond_the_memory_of_a_core() -> None:
    graph = Op("dot", Array("f32")), F32, F32
    assert find(*graph, memory_bytes=128) == ()
    (found,) = find(*graph, memory_bytes=127)
    assert str(found) == (
        "NCC_EVRF009: weights, state and inputs of 128 bytes; accepted: at most the 127 bytes of a core"
    )


def test_aliases_are_read() -> None:
    module = Module([[Op("parameter", F32), Op("parameter", F32, parameter=1)]], aliases={1: 0, 2: 1})
    assert read_hlo(module.encode()).aliases == {1: 0, 2: 1}


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05ab", b"\xff" * 11, b"\x0b", b"\x1a\x02\x12\x7f"])
def test_bytes_that_are_no_graph(data: bytes) -> None:
    with pytest.raises(MessageInvalid):
        read_hlo(data)


def test_sources_can_be_dropped_and_nothing_else() -> None:
    op = Op("while", (F32, Array("s64")), u64s=(1 << 40,), source=("/x/compiler_svc/a.py", 300), target="t" * 200)
    encoded = Module([[op, Op("tuple", F32, operands=(101,))], ADD], aliases={0: 300}).encode()
    whole, bare = read_hlo(encoded), read_hlo(drop_sources(encoded))
    assert SOURCE not in drop_sources(encoded)
    assert whole != bare
    assert bare == replace(
        whole,
        computations={
            place: replace(
                one,
                instructions={
                    name: replace(step, source_file="", source_line=0) for name, step in one.instructions.items()
                },
            )
            for place, one in whole.computations.items()
        },
    )
