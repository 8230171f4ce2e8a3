"""LoRA adapters beside a quantized linear layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from compiler_svc.models.divisions import Axis
from compiler_svc.models.layers.linear import Linear
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.step import StepKind, StepTokens
from compiler_svc.models.parameters import MemoryGroup
from compiler_svc.models.specs import AdapterSlots, LinearSpec
from execution.adapters import add_adapters

IDS = torch.tensor([1, -1, 0], dtype=torch.int32)


def fill(layer: Linear) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(layer.named_parameters()):
        if name == "weight":
            layer.weight = nn.Parameter(torch.randint(-127, 128, parameter.shape, generator=generator).char(), False)
        elif name == "scale":
            parameter.data = torch.full(parameter.shape, 1e-3)
        else:
            parameter.data = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("activations", ["", "int8"])
@torch.no_grad()
def test_adapters_take_the_input_before_it_is_quantized(activations: str) -> None:
    spec = LinearSpec(
        name="model.up_proj",
        inputs=Axis(64),
        outputs=Axis(24),
        group=MemoryGroup.MLP,
        has_bias=True,
        format="int8_per_channel",
        activations=activations,
        adapters=AdapterSlots(slots=2, rank=4),
    )
    adapted, plain = Linear(spec, Ranks(1)), Linear(replace(spec, adapters=None), Ranks(1))
    fill(adapted)
    plain.load_state_dict({name: tensor for name, tensor in adapted.state_dict().items() if "lora" not in name})
    plain.weight = adapted.weight
    hidden = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    # One large item, so that 127 steps leave little of the others.
    hidden[..., 0] = 50.0
    kind = StepKind(reads_cache=False, max_context=5)
    tokens = StepTokens(kind=kind, positions=IDS, block_table=IDS, last=None, adapter_ids=IDS)
    before, after = plain(hidden), adapted(hidden, tokens)
    assert torch.equal(after[1], before[1])
    assert adapted.lora_A is not None
    assert adapted.lora_B is not None
    assert_close(after - before, add_adapters(hidden, adapted.lora_A, adapted.lora_B, IDS), rtol=1e-5, atol=1e-3)
