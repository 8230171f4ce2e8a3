"""Makes one module of a graph's equal layers, which a lowering then compiles once, whatever their number.

A weight's name tells its layer: the first number in `model.layers.3.mlp.up_proj.weight`. From one layer to the next, a
graph is cut where the fewest values cross. Layers whose operations, shapes and constants are equal become calls of
`kiln::call_layer`; other layers, and what is before and behind the layers, stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from bundle.digest import sha256_bytes
from compiler_svc.lower.graph_text import render_call, render_value

#: Finds the names of a layer's list, `model.layers`, and the layer's number in it, in the name of a weight.
_NUMBERED: Final = re.compile(r"(?P<list>(?:[^.]+\.)*?)(?P<number>\d+)\.")
#: Layers by name, which are what `kiln::call_layer` calls.
_LAYERS: Final[dict[str, GraphModule]] = {}


@torch.library.custom_op("kiln::call_layer", mutates_args=("state",))
def call_layer(layer: str, reads: Sequence[Tensor], state: Sequence[Tensor]) -> Tensor:
    """Calls a layer that `outline_layers` made; returns the value that others read. The layer reads hidden values,
    weights and whatever else is in `reads`, in its own order, and writes `state` in place.
    """
    value: Tensor = _LAYERS[layer](*reads, *state)
    return value


@call_layer.register_fake
def _(layer: str, *_: Sequence[Tensor]) -> Tensor:
    (value,) = _LAYERS[layer].graph.output_node().args
    assert isinstance(value, Node)
    like = value.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


#: What graphs call.
CALL_LAYER: Final = torch.ops.kiln.call_layer.default


def outline_layers(module: GraphModule) -> dict[str, GraphModule]:
    """Replaces a graph's equal layers by calls of `kiln::call_layer`.

    Returns the layers by name: each a module of `(*reads, *state) -> value` without weights of its own. Empty if no
    layer is equal to another.
    """
    _fill_in_values(module.graph)
    _advance_copies(module.graph)
    segments = [one for one in map(_Segment.of, _cut_into_layers(module.graph)) if one is not None]
    counts = Counter(segment.name for segment in segments)
    repeated = [segment for segment in segments if counts[segment.name] > 1]
    layers = {segment.name: segment.extract() for segment in repeated}
    _LAYERS.update(layers)
    # From the last to the first, because a layer reads what the one before it returns.
    for segment in reversed(repeated):
        segment.replace_by_call()
    module.graph.lint()
    module.recompile()
    return layers


def _fill_in_values(graph: Graph) -> None:
    """Computes what is known of the values of operations that earlier passes put into the graph."""
    vals = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    with detect_fake_mode(vals) or nullcontext():
        for node in graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _advance_copies(graph: Graph) -> None:
    """Moves the copy that updates a state to the place where the new state is computed, which is in its layer. A copy
    stays if something reads the old state afterwards.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        state, new = copy.args[:2]
        readers = [user for user in state.users if user is not copy]
        if new.op == "call_function" and all(places[reader] <= places[new] for reader in readers):
            new.append(copy)


def _cut_into_layers(graph: Graph) -> list[list[Node]]:
    """Lists the operations of each layer; empty if layers cannot be told apart."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    spans = _find_spans(nodes)
    if len(spans) < 2 or any(last >= first for (_, last), (first, _) in pairwise(spans)):
        return []
    uses = _find_uses(graph, nodes)

    def count_crossing(place: int, first: int) -> tuple[int, int]:
        """Counts values from before a place that are read at it or behind it: the layer's own, and all."""
        crossing = [defined for defined, last in uses if defined < place <= last]
        return sum(defined >= first for defined in crossing), len(crossing)

    cuts = [
        min(range(last + 1, next_first + 1), key=partial(count_crossing, first=first))
        for (first, last), (next_first, _) in pairwise(spans)
    ]
    # What is before the first layer and behind the last one is no layer: they begin and end as their neighbours do.
    begin = spans[0][0] - (spans[1][0] - cuts[0])
    end = spans[-1][1] + (cuts[-1] - spans[-2][1])
    if begin < 0 or end > len(nodes):
        return []
    return [nodes[first:last] for first, last in pairwise([begin, *cuts, end])]


def _find_spans(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Finds the places of the first and the last operation with a weight of each layer, by the layers' numbers."""
    lists: dict[str, dict[int, list[int]]] = {}
    for place, node in enumerate(nodes):
        for weight in node.all_input_nodes:
            if weight.op == "get_attr" and (match := _NUMBERED.match(str(weight.target))):
                lists.setdefault(match["list"], {}).setdefault(int(match["number"]), []).append(place)
    layers = max(lists.values(), key=len, default={})
    return [(places[0], places[-1]) for _, places in sorted(layers.items())]


def _find_uses(graph: Graph, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Finds the places where each value is computed, which is -1 for inputs and weights, and where it is read last."""
    places = {node: place for place, node in enumerate(nodes)}
    uses = []
    for value in graph.nodes:
        place = places.get(value, -1)
        uses.append((place, max((places.get(user, len(nodes)) for user in value.users), default=place)))
    return uses


@dataclass(frozen=True, slots=True)
class _Segment:
    """The operations of a layer in a graph.

    Attributes:
        name: Equal for equal layers, and only for them.
        reads: Values from outside that the layer only reads, in the order of their first use.
        state: Inputs of the graph that the layer writes.
        value: The layer's only value that is read outside.
    """

    name: str
    nodes: list[Node]
    reads: list[Node]
    state: list[Node]
    value: Node

    @classmethod
    def of(cls, nodes: list[Node]) -> _Segment | None:
        """Describes a layer; None if it cannot be a function of tensors that returns one new tensor."""
        inside = set(nodes)
        outside = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside)
        written = dict.fromkeys(one for node in nodes for one in _list_written(node))
        values = [node for node in nodes if any(user not in inside for user in node.users)]
        if len(values) != 1 or any(one.op != "placeholder" for one in written):
            return None
        inputs = [*(one for one in outside if one not in written), *written]
        tensors = [tensor for one in (*inputs, *values) if isinstance(tensor := one.meta.get("val"), Tensor)]
        if len(tensors) <= len(inputs):
            return None
        # Fake tensors have storages of their own, but no addresses.
        *of_inputs, of_value = [tensor.untyped_storage()._cdata for tensor in tensors]  # noqa: SLF001
        if of_value in of_inputs:
            return None
        name = _name_layer(nodes, inputs, values[0])
        return cls(name, nodes, inputs[: len(inputs) - len(written)], list(written), values[0])

    def extract(self) -> GraphModule:
        graph = Graph()
        copies: dict[Node, Node] = {}
        for index, node in enumerate((*self.reads, *self.state)):
            copies[node] = graph.placeholder(f"argument{index}")
            copies[node].meta["val"] = node.meta["val"]
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[self.value])
        return GraphModule(torch.nn.Module(), graph)

    def replace_by_call(self) -> None:
        graph = self.value.graph
        with graph.inserting_after(self.nodes[-1]):
            call = graph.call_function(CALL_LAYER, (self.name, self.reads, self.state))
        call.meta["val"] = self.value.meta["val"]
        self.value.replace_all_uses_with(call)
        for node in reversed(self.nodes):
            graph.erase_node(node)


def _list_written(node: Node) -> Iterator[Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from given if isinstance(given, list | tuple) else [given]


def _name_layer(nodes: Sequence[Node], inputs: Sequence[Node], value: Node) -> str:
    numbers = {node: f"%{index}" for index, node in enumerate((*inputs, *nodes))}
    lines = [f"{numbers[node]} : {render_value(node.meta['val'])}" for node in inputs]
    lines += [
        f"{numbers[node]} = {render_call(node, numbers)} : {render_value(node.meta.get('val'))}" for node in nodes
    ]
    lines.append(f"output {numbers[value]}")
    return sha256_bytes("\n".join(lines).encode()).removeprefix("sha256:")[:16]
