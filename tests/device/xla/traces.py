"""One rank's submodels on the XLA device, as the lowering for Neuron builds them. Traces share weights and state.

A submodel is traced twice: the graph that is read has Neuron's own operators, whose custom calls only Neuron's compiler
knows; the graph that runs has torch-xla's instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model
from torch_xla.debug import metrics

from compiler_svc.lower.neuron.model_builder import OPERATORS
from compiler_svc.lower.neuron.submodel import MakeSubmodel, Submodel
from compiler_svc.lower.xla import register_operators
from compiler_svc.models.transforms import UNCHANGED, ModelChanges
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodel_document import MAKE_MODULE, write_document
from compiler_svc.trace.submodels import ExecutableSpec
from tests.device.xla.graphs import Graph, read_graph
from tests.neuron.standin import SITE
from tests.ranks.stepping import Run

Operators = Mapping[str, Callable[..., Any]]

# Front ends import the operators of Neuron's packages from there.
sys.path.append(str(SITE))


class Traces:
    """Makes runs of submodels, as a `Stepper` wants them. A step is one graph, or it fails.

    State is in buffers that every trace reads and assigns anew. Weights are tensors that every trace reads.

    Attributes:
        graphs: The graph that Neuron would get of each submodel that ran, by its tag.
    """

    def __init__(
        self, config: Mapping[str, Any], *, changes: ModelChanges = UNCHANGED, operators: Operators | None = None
    ) -> None:
        self.graphs: dict[str, Graph] = {}
        self._config = config
        self._operators = operators or {}
        self._changes = changes
        self._modules: list[torch.nn.Module] = []
        self._weights: dict[str, torch.Tensor] = {}
        self._state: dict[str, torch.Tensor] = {}

    def make_run(
        self, spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec, shard: Mapping[str, torch.Tensor]
    ) -> Run:
        """A submodel with named inputs. What it takes and gives is on the CPU, but for the state."""
        made = make_submodel(self._config, spec, plan, submodel, changes=self._changes)
        self._modules.append(made.module)
        if not self._weights:
            self._weights = to_device({name: shard[name] for name in made.weights})
        put_weights(made.module, self._weights)
        num_inputs, tag = len(submodel.inputs), submodel.tag

        @torch.no_grad()
        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = to_device(dict(zip(made.examples, tensors[:num_inputs], strict=True)))
            self._state = to_device(dict(zip(submodel.state, tensors[num_inputs:], strict=True)))
            if tag not in self.graphs:
                with register_operators(**OPERATORS["single"], **self._operators):
                    self.graphs[tag] = read_step(made, inputs, self._state, self._weights)
            with register_operators(**self._operators), one_graph():
                outputs, new_state = take_step(made, inputs, self._state)
                torch_xla.core.xla_model.unlazy([*outputs, *new_state.values()])
            self._state = new_state
            return (*(output.cpu() for output in outputs), *new_state.values())

        return run

    def swap(self, shard: Mapping[str, torch.Tensor]) -> None:
        """Puts other weights under the same names, for every trace; state stays."""
        self._weights = to_device({name: shard[name] for name in self._weights})
        for module in self._modules:
            put_weights(module, self._weights)

    def read_state(self) -> torch.Tensor:
        """A copy of all state on the CPU, stacked."""
        return torch.stack([tensor.cpu() for tensor in self._state.values()])


def make_submodel(
    config: Mapping[str, Any],
    spec: GraphSpec,
    plan: WeightPlan,
    submodel: ExecutableSpec,
    *,
    changes: ModelChanges = UNCHANGED,
) -> Submodel:
    """Builds a submodel as a front end for Neuron does: from JSON, by the name that the JSON comes with.

    Args:
        config: The model's `config.json`.
    """
    tensors = plan.describe_shard(0, None, 0).tensors
    document = write_document(config, spec, tensors, submodel, changes=changes)
    make: MakeSubmodel = resolve_name(MAKE_MODULE)
    return make(json.loads(json.dumps(document)))


def to_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the XLA device; those that are there already stay themselves."""
    return {name: tensor.to(torch_xla.device()) for name, tensor in tensors.items()}


def put_weights(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Makes tensors the parameters of a named submodel; its other persistent tensors are its state."""
    keys = module.load_state_dict(weights, strict=False, assign=True)
    assert keys.unexpected_keys == []
    assert set(keys.missing_keys) == {name for name, _ in module.named_buffers()}


def take_step(
    made: Submodel, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Runs a step over buffers with this state. Gives the outputs, and the buffers' tensors behind it.

    A buffer that keeps its tensor, or whose tensor is written in place, fails: Neuron's tracer would find no alias.
    """
    versions = {name: tensor._version for name, tensor in state.items()}
    made.put_state(state)
    outputs = made.module(**inputs)
    new_state = {one.name: made.module.get_buffer(one.name) for one in made.state}
    assert [name for name, tensor in state.items() if new_state[name] is tensor] == []
    assert versions == {name: tensor._version for name, tensor in state.items()}
    return outputs, new_state


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
def trace_graph(made: Submodel, shard: Mapping[str, torch.Tensor]) -> Graph:
    """A submodel's graph with a shard's weights. Nothing is compiled."""
    weights = to_device({name: shard[name] for name in made.weights})
    put_weights(made.module, weights)
    state = to_device({one.name: made.module.get_buffer(one.name) for one in made.state})
    return read_step(made, to_device(made.examples), state, weights)


def read_step(
    made: Submodel,
    inputs: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> Graph:
    """The graph of a step that is not taken: the submodel has its state as before."""
    outputs, new_state = take_step(made, inputs, state)
    graph = read_graph([*outputs, *new_state.values()], {**inputs, **state, **weights})
    # The next graph would begin with this one's collectives: torch-xla keeps their order beyond a graph.
    made.put_state(state)
    del outputs, new_state
    torch_xla.sync()
    return graph
