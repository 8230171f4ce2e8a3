"""At -O1 a row's logits have the same bits, whatever other rows hold, how many are live, and which of them it is."""

from __future__ import annotations

import random
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

#: Half of a head fills vectors of the processor. Vectors of sines that several rows share depend on all of them: a
#: position from 125 on takes the others along to a slower form, which differs in the last bit.
GEOMETRY = GEOMETRIES["gqa4-tied-llama3"] | {"head_dim": 32}
BATCHES = {"token_generation": 16, "context_encoding": 4}
BUCKETS = {"token_generation": 512, "context_encoding": 48}
NUM_TRIALS = 100


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.slow
@pytest.mark.toolchain
@pytest.mark.parametrize("name", BATCHES)
def test_rows_have_the_same_bits(tmp_path: Path, lowerings: ForkserverClient, name: str) -> None:
    tiny, rows, bucket = write_tiny_model(tmp_path / "model", GEOMETRY), BATCHES[name], BUCKETS[name]
    batches = {"ctx_batch_size": BATCHES["context_encoding"], "tkg_batch_size": BATCHES["token_generation"]}
    spec = tiny.spec(num_slots=rows + 1, skips_idle=True, max_length=512, **batches)
    submodel = describe_submodel(spec, name, bucket)
    traced = export_submodel(spec, tiny.plan(), submodel)
    live = find_live_inputs(submodel)
    executable = lower(lowerings, tmp_path, traced.program, num_state=len(submodel.state), live=live)
    shard = load_shard(tiny.plan(), tiny.checkpoint)
    generator, draw = torch.Generator().manual_seed(4), random.Random(4)
    state = [torch.randn(tensor.shape, generator=generator) for tensor in describe_state(spec).tensors]
    width = 1 if name == "token_generation" else bucket
    ids = torch.randint(8, 90, (rows, width), dtype=torch.int32, generator=generator)
    with open_library(executable, {one.name: shard[one.tensor] for one in traced.constants}) as library:

        def run(order: list[int], starts: list[int]) -> Tensor:
            """Logits of sequences by number, one a row; a prompt has as many tokens as its start says."""
            num_idle = rows - len(order)
            padded = order + order[:1] * num_idle
            numbers = int32([starts[number] for number in padded])
            positions = numbers[:, None] if width == 1 else torch.arange(width).expand(rows, -1)
            known = {
                "input_ids": ids[padded],
                "position_ids": positions.int().contiguous(),
                "seq_ids": int32(order + [rows] * num_idle),
                "num_tokens": numbers,
                "live_rows": int32([len(order)]),
            }
            inputs = [known[one.name] for one in submodel.inputs]
            return library.run([*inputs, *(tensor.clone() for tensor in state)])[0][: len(order)].clone()

        for _ in range(NUM_TRIALS):
            starts = [draw.randrange(1, draw.choice((bucket // 8, bucket))) for _ in range(rows)]
            order = draw.sample(range(rows), draw.randint(1, rows))
            alone = torch.cat([run([number], starts) for number in order])
            assert len(alone.unique(dim=0)) == len(order)
            assert run(order, starts).equal(alone), (order, starts)
