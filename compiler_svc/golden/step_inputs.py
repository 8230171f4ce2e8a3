"""Inputs of golden steps: one live row, every other row idle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bundle.manifest import Executable, Manifest, TensorSpec
from execution.dtypes import TORCH_DTYPES

#: Makes a sampling executable greedy where requests choose: top_k, top_p, temperature.
GREEDY_PARAMS = (1.0, 1.0, 0.0)
#: The random number where the executable takes one.
RAND = 0.5


def make_context_inputs(
    manifest: Manifest, executable: Executable, prompt: Sequence[int], slot: int
) -> dict[str, Tensor]:
    """Inputs that encode a prompt into a slot, in row 0."""
    inputs = _make_idle_inputs(manifest, executable)
    first = executable.bucket[0] - len(prompt) if "left_padded" in executable.flags else 0
    inputs["input_ids"][0, first : first + len(prompt)] = torch.tensor(prompt)
    inputs["position_ids"][0, first : first + len(prompt)] = torch.arange(len(prompt))
    inputs["seq_ids"][0] = slot
    inputs["num_tokens"][0] = len(prompt)
    return inputs


def make_token_inputs(
    manifest: Manifest, executable: Executable, token: int, position: int, slot: int
) -> dict[str, Tensor]:
    """Inputs that feed a slot's newest token, in the slot's row."""
    inputs = _make_idle_inputs(manifest, executable)
    inputs["input_ids"][slot, 0] = token
    inputs["position_ids"][slot, 0] = position
    inputs["seq_ids"][slot] = slot
    return inputs


def _make_idle_inputs(manifest: Manifest, executable: Executable) -> dict[str, Tensor]:
    return {tensor.name: _make_idle_input(manifest, tensor) for tensor in executable.inputs}


def _make_idle_input(manifest: Manifest, tensor: TensorSpec) -> Tensor:
    match tensor.name:
        case "sampling_params":
            return torch.tensor(GREEDY_PARAMS).expand(tensor.shape).contiguous()
        case "rand":
            return torch.full(tensor.shape, RAND)
        case "input_ids":
            value = manifest.tokens.pad
        case "seq_ids":
            value = manifest.state.num_slots
        case "num_tokens":
            value = 1
        case _:
            value = 0
    return torch.full(tensor.shape, value, dtype=TORCH_DTYPES[tensor.dtype])
