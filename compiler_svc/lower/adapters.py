"""Adapters between the functional graphs that models are traced to and the state that backends want."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import ExportedProgram


class InPlaceProgram(nn.Module):
    """Runs `(inputs, state) -> (outputs, new state)` as `(inputs, state) -> outputs`, writing the state where it lies.

    The compiler turns the final copies into the update itself: a decode step writes the new rows and copies no cache.
    """

    def __init__(self, program: ExportedProgram, num_state: int) -> None:
        """Takes the last `num_state` inputs and outputs of the program to be its state."""
        super().__init__()
        functional = program.module(check_guards=False)
        # Not a child of this module but in its place, sharing its registries: so the constants keep their names.
        for registry in ("_parameters", "_buffers", "_modules"):
            self.__dict__[registry] = functional.__dict__[registry]
        self.__dict__["_functional"] = functional
        self._num_state = num_state

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the program once."""
        results = self.__dict__["_functional"](*arguments)
        state = arguments[len(arguments) - self._num_state :]
        new_state = results[len(results) - self._num_state :]
        for tensor, new in zip(state, new_state, strict=True):
            tensor.copy_(new)
        return tuple(results[: len(results) - self._num_state])
