"""One rank's submodels on the XLA device: their traces share weights and state, which stay there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch_xla
import torch_xla.core.xla_model
from torch_xla.debug import metrics

from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.program import SubmodelProgram, build_program, make_example_tensors
from compiler_svc.trace.submodels import ExecutableSpec
from tests.ranks.stepping import Run


class Traces:
    """Makes runs of submodels, as a `Stepper` wants them. A step is one graph, or it fails.

    State is in buffers that every trace reads and assigns anew. Weights are tensors that every trace reads.
    """

    def __init__(self) -> None:
        self._programs: list[SubmodelProgram] = []
        self._weights: dict[str, torch.Tensor] = {}
        self._state = torch.nn.Module()

    def make_run(
        self, spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec, shard: Mapping[str, torch.Tensor]
    ) -> Run:
        """The functional module itself. What it takes and gives is on the CPU, but for the state."""
        program = build_program(spec, plan, submodel).to(torch_xla.device())
        self._programs.append(program)
        if not self._weights:
            self._weights = {tensor.name: shard[tensor.name].to(torch_xla.device()) for tensor in plan.tensors}
        self._assign(program)
        num_inputs, num_outputs = len(submodel.inputs), len(submodel.outputs)

        @torch.no_grad()
        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self._keep(tensors[num_inputs:])
            inputs = [tensor.to(torch_xla.device()) for tensor in tensors[:num_inputs]]
            with one_graph():
                outputs, new_state = self._trace(program, inputs, num_outputs)
                torch_xla.core.xla_model.unlazy([*outputs, *new_state])
            self._keep(new_state)
            return (*(output.cpu() for output in outputs), *self._state.buffers())

        return run

    def swap(self, shard: Mapping[str, torch.Tensor]) -> None:
        """Puts other weights under the same names, for every trace; state stays."""
        self._weights = {name: shard[name].to(torch_xla.device()) for name in self._weights}
        for program in self._programs:
            self._assign(program)

    def read_state(self) -> torch.Tensor:
        """A copy of all state on the CPU, stacked."""
        return torch.stack([tensor.cpu() for tensor in self._state.buffers()])

    def _assign(self, program: SubmodelProgram) -> None:
        program.core.load_state_dict(self._weights, assign=True)

    def _keep(self, state: tuple[torch.Tensor, ...]) -> None:
        for index, tensor in enumerate(state):
            self._state.register_buffer(f"state_{index}", tensor.to(torch_xla.device()))

    def _trace(
        self, program: SubmodelProgram, inputs: list[torch.Tensor], num_outputs: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        results = program(*inputs, *self._state.buffers())
        return results[:num_outputs], results[num_outputs:]


@contextmanager
def one_graph() -> Iterator[None]:
    """Fails if the block runs no graph on the device, or more than one."""
    before = count_graphs()
    yield
    assert count_graphs() - before == 1


def count_graphs() -> int:
    """Graphs that the device was given to run since the counters were cleared."""
    return metrics.counter_value("ExecuteComputation") or 0


def count_compiles() -> int:
    """Graphs that were compiled since then; those that equal others are not."""
    return metrics.counter_value("UncachedCompile") or 0


def list_fallbacks() -> list[str]:
    """The operators that ran on the CPU since the counters were cleared."""
    return [name for name in metrics.counter_names() if name.startswith("aten::")]


@torch.no_grad()
def write_graph(
    spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec, shard: Mapping[str, torch.Tensor]
) -> tuple[str, list[str]]:
    """A submodel's graph as text of HLO, and the inputs and states that it does not read. Nothing is compiled."""
    device = torch_xla.device()
    program = build_program(spec, plan, submodel).to(device)
    program.core.load_state_dict({tensor.name: shard[tensor.name].to(device) for tensor in plan.tensors}, assign=True)
    examples = [torch.zeros_like(tensor).to(device) for tensor in make_example_tensors(spec, submodel)]
    names = [*(tensor.name for tensor in submodel.inputs), *submodel.state]
    results = list(program(*examples))
    read, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(results)
    numbers = map(torch_xla._XLAC._xla_get_tensor_id, examples)
    unread = [name for name, number in zip(names, numbers, strict=True) if number not in read]
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(results)
    # The next graph would begin with this one's collectives: torch-xla keeps their order beyond a graph.
    del results
    torch_xla.sync()
    return text, unread
