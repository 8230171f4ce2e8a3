"""Renders what operations of a graph take and give as text, for digests and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node


def render_call(node: Node, numbers: Mapping[Node, str]) -> str:
    """Renders a call of an operator; see `render_argument`."""
    arguments = [render_argument(argument, numbers) for argument in node.args]
    arguments += [f"{key}={render_argument(value, numbers)}" for key, value in sorted(node.kwargs.items())]
    return f"{node.target}({', '.join(arguments)})"


def render_argument(argument: Any, numbers: Mapping[Node, str]) -> str:
    """Renders an operation's argument; `numbers` has the names of other operations' values."""
    match argument:
        case Node():
            return numbers[argument]
        case list() | tuple():
            return f"[{', '.join(render_argument(item, numbers) for item in argument)}]"
        case None | bool() | int() | float() | str():
            return repr(argument)
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return str(argument)
    raise AssertionError(f"{type(argument).__name__} in an exported graph")


def render_value(value: Any) -> str:
    """Renders dtype, shape and strides of a node's value, or of each item of a sequence; empty if it has no value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {list(value.stride())}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(render_value, value))}]"
    return repr(value) if isinstance(value, bool | int | float) else ""
