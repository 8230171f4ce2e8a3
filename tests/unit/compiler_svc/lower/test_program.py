from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.program import constant_names, example_inputs, load_program, save_program

MARK = 1234.5678


class Net(nn.Module):
    """y = relu(x · w) + b, with a marked weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        nn.init.constant_(self.linear.weight, MARK)
        self.register_buffer("shift", torch.full((64,), MARK, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.relu(self.linear(x)) + self.shift,)


def export_net(net: nn.Module) -> ExportedProgram:
    return torch.export.export(net, (torch.full((2, 64), MARK),))


def contents(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return b"".join(archive.read(name) for name in archive.namelist())


def test_neither_weights_nor_inputs_nor_source_places_are_saved(tmp_path: Path) -> None:
    save_program(export_net(Net()), tmp_path / "program.pt2")
    saved = contents(tmp_path / "program.pt2")
    assert torch.tensor(MARK).numpy().tobytes() not in saved
    assert torch.tensor(MARK).bfloat16().view(torch.int16).numpy().tobytes() * 2 not in saved
    assert b"test_program" not in saved
    assert b"stack_trace" not in saved
    assert len(saved) < 64 * 64 * 4


def test_equal_graphs_are_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_program(export_net(Net()), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saving_leaves_the_program_alone(tmp_path: Path) -> None:
    program = export_net(Net())
    before = str(program.graph), [dict(node.meta).keys() for node in program.graph.nodes]
    save_program(program, tmp_path / "program.pt2")
    assert (str(program.graph), [dict(node.meta).keys() for node in program.graph.nodes]) == before
    assert program.state_dict["linear.weight"].shape == (64, 64)


def test_a_loaded_program_has_shapes_and_computes_the_same(tmp_path: Path) -> None:
    net = Net()
    save_program(export_net(net), tmp_path / "program.pt2")
    program = load_program(tmp_path / "program.pt2")
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in net.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in program.state_dict.items()} == expected
    assert [tuple(tensor.shape) for tensor in example_inputs(program)] == [(2, 64)]
    module = program.module(check_guards=False)
    module.load_state_dict(net.state_dict())
    x = torch.randn(2, 64)
    torch.testing.assert_close(module(x), net(x))


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(20_000, 20_000))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * self.weight[0, 0],)


def test_loading_touches_no_weight_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        large = Large()
    save_program(torch.export.export(large.to_empty(device="cpu"), (torch.zeros(1, 1),)), tmp_path / "program.pt2")
    before = resident_bytes()
    program = load_program(tmp_path / "program.pt2")
    assert program.state_dict["weight"].nbytes == 1_600_000_000
    assert resident_bytes() - before < 100_000_000


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


class Lifted(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + torch.tensor([1.0, 2.0]),)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + self.table,)


class WritesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.seen.add_(x)
        return (x + self.seen,)


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        x.add_(1)
        return (x * 2,)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Lifted(), "constant tensor '.*lifted_tensor.*' is data of the graph's own: make it a parameter"),
        (Hidden(), "buffer 'table' is data of the graph's own: make it a parameter or a persistent buffer"),
        (WritesBuffer(), "is a buffer_mutation: state must be returned, not written"),
        (WritesInput(), "is a user_input_mutation: state must be returned, not written"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_programs_that_break_the_convention(module: nn.Module, message: str) -> None:
    program = torch.export.export(module, (torch.zeros(2),)).run_decompositions({})
    with pytest.raises(ProgramUnsupported, match=message):
        constant_names(program)
