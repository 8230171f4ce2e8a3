"""At -O1 a row's logits have the same bits, whatever the number of live rows, and whichever of them it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiler_svc.builds.executable_stage import find_live_inputs
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_state, describe_submodel
from execution.forkserver.client import ForkserverClient
from tests.checkpoints.tiny_models import write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.ranks.stepping import load_shard
from tests.service.compiler_svc.lower.libraries import lower, open_library

BATCHES = {"token_generation": 16, "context_encoding": 4}
BUCKETS = {"token_generation": 64, "context_encoding": 48}
#: Tokens of sequences that a step of token_generation goes on with.
CACHED = 40
#: Tokens of the first prompts; others have as many in turns.
LENGTHS = (48, 1, 17, 30)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.parametrize("name", BATCHES)
def test_rows_have_the_same_bits(tmp_path: Path, lowerings: ForkserverClient, name: str) -> None:
    tiny, rows = write_tiny_model(tmp_path / "model", GEOMETRIES["gqa4-tied-llama3"]), BATCHES[name]
    batches = {"ctx_batch_size": BATCHES["context_encoding"], "tkg_batch_size": BATCHES["token_generation"]}
    spec = tiny.spec(num_slots=rows + 1, skips_idle=True, **batches)
    submodel = describe_submodel(spec, name, BUCKETS[name])
    traced = export_submodel(spec, tiny.plan(), submodel)
    live = find_live_inputs(submodel)
    executable = lower(lowerings, tmp_path, traced.program, num_state=len(submodel.state), live=live)
    shard = load_shard(tiny.plan(), tiny.checkpoint)
    generator = torch.Generator().manual_seed(4)
    state = [torch.randn(tensor.shape, generator=generator) for tensor in describe_state(spec).tensors]
    start, width = (CACHED, 1) if name == "token_generation" else (0, BUCKETS[name])
    ids = torch.randint(8, 90, (rows, width), dtype=torch.int32, generator=generator)
    with open_library(executable, {one.name: shard[one.tensor] for one in traced.constants}) as library:

        def run(order: list[int]) -> Tensor:
            """Logits of sequences by number, one a row."""
            padded = order + order[:1] * (rows - len(order))
            known = {
                "input_ids": ids[padded],
                "position_ids": (torch.arange(width) + start).expand(rows, -1).int().contiguous(),
                "seq_ids": int32(order + [rows] * (rows - len(order))),
                "num_tokens": int32([LENGTHS[number % len(LENGTHS)] for number in padded]),
                "live_rows": int32([len(order)]),
            }
            inputs = [known[one.name] for one in submodel.inputs]
            return library.run([*inputs, *(tensor.clone() for tensor in state)])[0][: len(order)]

        alone = torch.cat([run([number]) for number in range(rows)])
        assert len(alone.unique(dim=0)) == rows
        for num_live in range(2, rows + 1):
            for order in ([*range(num_live)], [*reversed(range(rows - num_live, rows))]):
                assert run(order).equal(alone[order])
