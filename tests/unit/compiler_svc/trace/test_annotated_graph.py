"""Graphs with the lines of code that their operations come from."""

import linecache

import msgspec
import pytest

from compiler_svc.trace.annotated_graph import Operation, annotate_graph
from compiler_svc.trace.export import TracedSubmodel, export_submodel
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.specs import HOST_SAMPLING
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model
from tests.repository import ROOT

DYNAMIC = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", dynamic=True, global_topk=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("model"), GEOMETRIES["gqa-llama3-tied"] | {"num_hidden_layers": 1})


def export(tiny: TinyModel, *, with_sources: bool) -> TracedSubmodel:
    spec = tiny.spec(sampling=DYNAMIC)
    submodel = describe_submodel(spec, "token_generation", 32)
    return export_submodel(spec, tiny.plan(dtype=spec.dtype), submodel, with_sources=with_sources)


def annotate(traced: TracedSubmodel) -> list[Operation]:
    inputs = [tensor.name for tensor in traced.spec.inputs]
    return list(annotate_graph(traced.program, [*inputs, *traced.spec.state]))


@pytest.fixture(scope="module")
def traced(tiny: TinyModel) -> TracedSubmodel:
    return export(tiny, with_sources=True)


@pytest.fixture(scope="module")
def operations(traced: TracedSubmodel) -> list[Operation]:
    return annotate(traced)


def test_every_operation_has_its_line(operations: list[Operation]) -> None:
    inner = [one for one in operations if one.op_type not in {"input", "parameter", "output"}]
    assert len(inner) > 100
    for one in inner:
        assert one.source_file is not None
        assert one.source_line is not None
        assert (ROOT / one.source_file).is_file()
        assert linecache.getline(str(ROOT / one.source_file), one.source_line).strip(), one
    assert {one.source_file for one in inner} >= {
        "compiler_svc/models/layers/attention.py",
        "compiler_svc/models/layers/decoder.py",
        "compiler_svc/models/layers/rope.py",
        "execution/sampling.py",
    }


def test_lines_are_those_that_call_the_operation(operations: list[Operation]) -> None:
    lines = {
        one.op_type: linecache.getline(str(ROOT / one.source_file), one.source_line or 0)
        for one in operations
        if one.source_file is not None
    }
    assert "kiln.attend(" in lines["kiln.attend.default"]
    assert "topk" in lines["aten.topk.default"]
    assert "cumsum" in lines["aten.cumsum.default"]
    assert "rsqrt" in lines["aten.rsqrt.default"]


def test_the_graph_is_whole(traced: TracedSubmodel, operations: list[Operation]) -> None:
    assert [one.op_name for one in operations] == [node.name for node in traced.program.graph.nodes]
    inputs = [one.arguments for one in operations if one.op_type == "input"]
    assert inputs == [*(tensor.name for tensor in traced.spec.inputs), *traced.spec.state]
    parameters = {one.arguments for one in operations if one.op_type == "parameter"}
    assert parameters >= {constant.name for constant in traced.constants}
    known: set[str] = set()
    for one in operations:
        for name in one.arguments.replace("[", " ").replace("]", " ").replace(",", " ").split():
            assert name in known or not name.startswith(("linear", "mul", "view", "tensors")), name
        known.add(one.op_name)


def test_modules_and_values_are_named(operations: list[Operation]) -> None:
    (query, key, value, output) = [
        one for one in operations if "self_attn" in one.module and one.op_type.startswith("aten.linear")
    ]
    assert query.module == "model.layers.0.self_attn.q_proj"
    assert output.module == "model.layers.0.self_attn.o_proj"
    assert query.value == "torch.float32 [3, 1, 64] [64, 64, 1]"
    assert "p_core_model_layers_0_self_attn_k_proj_weight" in key.arguments
    assert value.op_name.startswith("linear")


def test_nothing_of_this_machine_is_in_it(operations: list[Operation]) -> None:
    text = msgspec.json.encode(operations).decode()
    assert str(ROOT) not in text
    assert "site-packages" not in text


def test_equal_graphs_are_equal_records(tiny: TinyModel, operations: list[Operation]) -> None:
    assert annotate(export(tiny, with_sources=True)) == operations


def test_lines_change_no_digest_and_are_noted_only_where_they_are_wanted(
    tiny: TinyModel, traced: TracedSubmodel
) -> None:
    plain = export(tiny, with_sources=False)
    assert plain.graph_digest == traced.graph_digest
    assert all(one.source_line is None for one in annotate(plain))
