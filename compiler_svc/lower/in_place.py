"""Makes programs write their state in place: from `(inputs, state) -> (outputs, new state)` to `(inputs, state) ->
outputs`.

New state is copied at the program's end. What computes it turns the copy into the update itself where it can: see
`attend.use_attend_kernel`, and Inductor for other operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import CodeGen


def write_in_place(program: ExportedProgram, num_state: int) -> GraphModule:
    """Makes a module of a functional program that writes its state in place and returns its outputs alone.

    Args:
        program: Its last `num_state` inputs are its state, its last `num_state` outputs the new state.
    """
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    results: Sequence[Any] = output.args[0]
    state = graph.find_nodes(op="placeholder")[-num_state:] if num_state else []
    new_state = results[len(results) - num_state :]
    output.args = (tuple(results[: len(results) - num_state]),)
    with graph.inserting_before(output):
        for old, new in zip(state, new_state, strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (old, new))
    # The program's own code would put the results into the form of all results, those that are state included.
    graph.set_codegen(CodeGen())
    graph.lint()
    module.recompile()
    return module
