"""The double of what gives the graphs of tensors: records operations as they run.

If NEURON_TEST_TORCH_XLA names a file, the program in it runs before the first placeholder is made.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.neuron.graphs import render_hlo


class Recorder(TorchDispatchMode):
    """Records every operation, from the first placeholder to the end of the process."""

    def __init__(self) -> None:
        super().__init__()
        self._graph = Graph()
        self._fake = FakeTensorMode()
        #: Tensors are kept, so that no other one gets the same identity.
        self._nodes: dict[int, tuple[torch.Tensor, Node]] = {}
        self.placeholders: dict[int, Node] = {}

    def add_placeholder(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not self.placeholders:
            program = Path(os.environ.get("NEURON_TEST_TORCH_XLA", "none"))
            exec(program.read_text() if program.exists() else "")
            # What it records computes nothing: the one rank that is there has no other to exchange tensors with.
            self._fake.__enter__()
            self.__enter__()
        with _disable_current_modes(), self._fake:
            tensor = torch.empty(shape, dtype=dtype)
        node = self._graph.placeholder(f"p{len(self.placeholders)}")
        self._keep(tensor, node)
        self.placeholders[id(tensor)] = node
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        taken = [self._nodes[id(one)][1] for one in tree_leaves((args, kwargs)) if id(one) in self._nodes]
        node = self._graph.create_node("call_function", function, tuple(taken))
        tensors = [one for one in tree_leaves(returned) if isinstance(one, torch.Tensor)]
        node.meta |= {"val": tensors, "source": find_source()}
        if isinstance(returned, torch.Tensor):
            node.meta["val"] = returned
            self._keep(returned, node)
            return returned
        for place, one in enumerate(tensors):
            part = self._graph.create_node("call_function", operator.getitem, (node, place))
            self._keep(one, part)
        return returned

    def render(self, tensors: Sequence[torch.Tensor]) -> bytes:
        results = [self._nodes[id(one)][1] for one in tensors]
        read = self.find_read(tensors)
        for node in reversed(self._graph.nodes):
            if node not in read and not node.users and node.op != "placeholder":
                self._graph.erase_node(node)
        inputs = [node for node in self.placeholders.values() if node in read]
        return render_hlo(self._graph, inputs, results, {})

    def find_read(self, tensors: Sequence[torch.Tensor]) -> set[Node]:
        """All that tensors are computed from, and themselves."""
        found: set[Node] = set()
        waiting = [self._nodes[id(one)][1] for one in tensors]
        while waiting:
            if (node := waiting.pop()) not in found:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    def _keep(self, tensor: torch.Tensor, node: Node) -> None:
        node.meta.setdefault("val", tensor)
        self._nodes[id(tensor)] = (tensor, node)


RECORDER = Recorder()


def find_source() -> tuple[str, int]:
    """The innermost line of Kiln's own."""
    frame = sys._getframe()
    while frame is not None:
        if any(f"/{folder}/" in frame.f_code.co_filename for folder in ("compiler_svc", "execution")):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _get_xla_tensors_hlo_proto(tensors: list[torch.Tensor]) -> bytes:
    return RECORDER.render(tensors)


def _get_tensors_xla_device_data_node(tensors: list[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    read = RECORDER.find_read(tensors)
    return [tensor for tensor, node in RECORDER.placeholders.items() if node in read], []


def _xla_get_tensor_id(tensor: torch.Tensor) -> int:
    return id(tensor)
