"""Ranks in processes of their own, whose executables change logits before they pick tokens together."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from torch import Tensor

from bundle.abi.inputs import PROCESSORS, read_sampling_params
from bundle.digest import sha256_file
from bundle.manifest import Executable
from compiler_svc.builds.executable_stage import find_live_inputs
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_submodel
from execution.forkserver.client import ForkserverClient
from execution.processors import sample_on_host
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.step import Step, StepForm
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.tiny_models import draw_tokens, write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.ranks.noise import draw_keys
from tests.ranks.processed_rows import draw_asked, make_changes
from tests.service.compiler_svc.lower.libraries import lower
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

DEGREE: Final = 2
BUCKET: Final = 16
ROWS: Final = 3
SEQUENCES: Final = tuple(draw_tokens(6, seed=row) for row in range(ROWS))
NUM_STEPS: Final = 6


@pytest.fixture(params=[0, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.toolchain])])
def bundle(request: pytest.FixtureRequest, tmp_path: Path, lowerings: ForkserverClient) -> UnpublishedBundle:
    """A bundle whose step for tokens exists with processors alone, at an optimization level."""
    tiny = write_tiny_model(tmp_path / "model", GEOMETRIES["padded-gqa2-yarn"] | {"num_hidden_layers": 1})
    sampling = make_sampling(dynamic=True)
    options = {"output_logits": True, "skips_idle": True, "optional_inputs": (PROCESSORS,)}
    spec, plan = tiny.spec(tp_degree=DEGREE, sampling=sampling, **options), tiny.plan(tp_degree=DEGREE)
    (tmp_path / "bundle").mkdir()
    buckets = {"context_buckets": (BUCKET,), "token_buckets": (BUCKET,)}
    made = make_bundle(tmp_path / "bundle", spec, plan, tiny.checkpoint, **buckets)
    executable = next(one for one in made.manifest.executables if PROCESSORS in one.flags)
    blobs = made.blobs
    if request.param:
        submodel = describe_submodel(spec, "token_generation", BUCKET, processes=True)
        program, live = export_submodel(spec, plan, submodel).program, find_live_inputs(submodel)
        lowered = lower(lowerings, tmp_path / "lowered", program, num_state=len(executable.state), live=live)
        executable = msgspec.structs.replace(
            executable,
            format=lowered.format,
            state_convention=lowered.state_convention,
            blob=sha256_file(lowered.path),
            constants=tuple(one for one in executable.constants if one.name in lowered.constants),
        )
        blobs = {**blobs, executable.blob: lowered.path}
    manifest = msgspec.structs.replace(made.manifest, executables=(executable,), optimization_level=request.param)
    return UnpublishedBundle(manifest, blobs)


async def run(bundle: UnpublishedBundle, forkservers: RankForkservers, num_live: int) -> None:
    """Compares each step's tokens with those that the host picks of the step's logits."""
    manifest = bundle.manifest
    (decode,) = manifest.executables
    group = await RankGroup.start(manifest, bundle.blob_path, num_threads=1, open_forkserver=forkservers.open)
    draw = random.Random(3)
    try:
        await group.load()
        for position in range(NUM_STEPS):
            vocab_size = manifest.tokens.vocab_size
            rows = [draw_asked(draw, vocab_size) for _ in range(num_live)]
            params = torch.tensor([read_sampling_params(row.sampling) for row in rows])
            keys = draw_keys(num_live, position)
            changes = make_changes(rows, vocab_size)
            step = make_step(bundle, decode, position, changes | {"sampling_params": params, "noise_keys": keys})
            result = await group.run(step)
            assert result.logits is not None
            logits = torch.frombuffer(result.logits, dtype=torch.float32).view(result.logits.shape)[:num_live]
            described = [asked.describe(vocab_size, row) for row, asked in enumerate(rows)]
            expected = sample_on_host(logits, params, keys, described, manifest.sampling.global_topk)
            assert [token for (token,) in result.tokens[:num_live]] == expected.tolist()
    finally:
        await group.close()


def make_step(bundle: UnpublishedBundle, decode: Executable, position: int, values: dict[str, Tensor]) -> Step:
    form = StepForm(bundle.manifest, decode)
    inputs = form.make_idle()
    for row in range(len(values["noise_keys"])):
        form.put_tokens(inputs, row, [SEQUENCES[row][position]], start=position, blocks=(row,))
        for name, tensor in values.items():
            form.put_values(inputs, name, row, tensor[row].tolist())
    return Step(decode.tag, inputs, return_logits=True)


@pytest.mark.parametrize("num_live", [ROWS, 2])
def test_ranks_pick_what_the_host_would(bundle: UnpublishedBundle, forkservers: RankForkservers, num_live: int) -> None:
    asyncio.run(run(bundle, forkservers, num_live))
