"""Programs that write their state where it lies."""

from __future__ import annotations

import pytest
import torch
from torch.export import ExportedProgram

from bundle.abi.submodels import SubmodelName
from compiler_svc.lower.aoti import write_in_place
from compiler_svc.lower.attend import use_attend_kernel
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.tiny_models import GEOMETRIES, write_tiny_model
from tests.ranks.toy import NUM_STATE, STATE_SHAPE, describe, export, make_model


def arguments() -> list[torch.Tensor]:
    inputs = (torch.tensor([[3], [4]]), torch.tensor([[0], [5]]), torch.tensor([0, 1]))
    return [*(tensor.to(torch.int32) for tensor in inputs), *(torch.zeros(STATE_SHAPE) for _ in range(NUM_STATE))]


@torch.no_grad()
def test_state_is_written_where_it_lies() -> None:
    module = write_in_place(export(describe("token_generation", "logits"), "logits"), NUM_STATE)
    module.load_state_dict(make_model(0).state_dict())
    given = arguments()
    (logits,) = module(*given)
    expected, *state = make_model(0)(*arguments())
    torch.testing.assert_close(logits, expected)
    for written, new in zip(given[-NUM_STATE:], state, strict=True):
        torch.testing.assert_close(written, new)
    assert all(tensor.any() for tensor in given[-NUM_STATE:])


@pytest.fixture(scope="module", params=["context_encoding", "token_generation"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportedProgram, int]:
    """A submodel of a model with two layers, and its number of state tensors."""
    tiny = write_tiny_model(tmp_path_factory.mktemp("model"), GEOMETRIES["gqa-llama3-tied"])
    submodel: SubmodelName = request.param
    spec = tiny.spec()
    executable = describe_submodel(spec, submodel, 16)
    return export_submodel(spec, tiny.plan(), executable).program, len(executable.state)


@torch.no_grad()
def test_attention_writes_caches_and_nothing_else_has_their_size(traced: tuple[ExportedProgram, int]) -> None:
    program, num_state = traced
    module = write_in_place(program, num_state)
    use_attend_kernel(module)
    graph = module.graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.kiln.attend_in_place.default)) == num_state // 2
    state = graph.find_nodes(op="placeholder")[-num_state:]
    # What is left of the copies to the state copies it to itself, which Inductor drops.
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert [copy.args for copy in copies] == [(node, node) for node in state]
    users = {use for node in state for use in node.users} - set(copies)
    assert {use.target for use in users} == {torch.ops.kiln.attend_in_place.default}
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@torch.no_grad()
def test_the_functional_program_computes_the_same(traced: tuple[ExportedProgram, int]) -> None:
    program, num_state = traced
    functional = program.module(check_guards=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in functional.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    given = []
    for node in functional.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        is_state = like.dtype == torch.float32
        given.append(
            torch.randn(like.shape, generator=generator) if is_state else torch.ones(like.shape, dtype=like.dtype)
        )
    expected = functional(*(tensor.clone() for tensor in given))
    module = write_in_place(program, num_state)
    use_attend_kernel(module)
    outputs = module(*given)
    torch.testing.assert_close([*outputs, *given[-num_state:]], list(expected))
