"""Ranks in processes of their own: they, or their executables, change logits before they pick tokens together."""

from __future__ import annotations

import asyncio
import random
from array import array
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from torch import Tensor

from bundle.abi.inputs import PROCESSORS, read_sampling_params
from bundle.digest import sha256_file
from bundle.manifest import Executable
from compiler_svc.builds.executable_stage import find_live_inputs
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
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
NUM_STEPS: Final = 6
SEQUENCES: Final = tuple(draw_tokens(NUM_STEPS + 2, seed=row) for row in range(ROWS))


def make_plain(directory: Path, **options: Any) -> tuple[UnpublishedBundle, GraphSpec, WeightPlan]:
    """A bundle for two ranks, at optimization level 0, with what it was made of."""
    tiny = write_tiny_model(directory / "model", GEOMETRIES["padded-gqa2-yarn"] | {"num_hidden_layers": 1})
    spec = tiny.spec(tp_degree=DEGREE, sampling=make_sampling(dynamic=True), skips_idle=True, **options)
    plan = tiny.plan(tp_degree=DEGREE)
    (directory / "bundle").mkdir()
    buckets = {"context_buckets": (BUCKET,), "token_buckets": (BUCKET,)}
    return make_bundle(directory / "bundle", spec, plan, tiny.checkpoint, **buckets), spec, plan


@pytest.fixture(params=[0, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.toolchain])])
def bundle(request: pytest.FixtureRequest, tmp_path: Path, lowerings: ForkserverClient) -> UnpublishedBundle:
    """A bundle whose step for tokens exists with processors alone, at an optimization level."""
    made, spec, plan = make_plain(tmp_path, output_logits=True, optional_inputs=(PROCESSORS,))
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
            result = await group.run(msgspec.structs.replace(step, return_logits=True))
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
    return Step(decode.tag, inputs)


async def pick_in_ranks(bundle: UnpublishedBundle, forkservers: RankForkservers) -> None:
    """Compares tokens with those that the host picks of the logits that ranks have, and a dependent step with one that
    is told the tokens.
    """
    manifest, draw = bundle.manifest, random.Random(4)
    (decode,) = manifest.executables_of("token_generation")
    options = {"num_threads": 1, "open_forkserver": forkservers.open, "with_internal": True}
    group = await RankGroup.start(manifest, bundle.blob_path, **options)

    def ask(position: int) -> Step:
        """All rows but the second one ask for processors."""
        vocab_size = manifest.tokens.vocab_size
        rows = [draw_asked(draw, vocab_size) for _ in range(ROWS)]
        values = {
            "sampling_params": torch.tensor([read_sampling_params(row.sampling) for row in rows]),
            "noise_keys": draw_keys(ROWS, position),
        }
        step = make_step(bundle, decode, position, values)
        return msgspec.structs.replace(step, processed=tuple(rows[row].describe(vocab_size, row) for row in (0, 2)))

    try:
        await group.load()
        for position in range(NUM_STEPS):
            step = ask(position)
            result = await group.run(step)
            parts = result.internal["rank_logits"]
            logits = torch.frombuffer(parts, dtype=torch.float32).view(parts.shape).transpose(0, 1).flatten(1)
            dtypes = {"sampling_params": torch.float32, "noise_keys": torch.int32}
            params, keys = (torch.frombuffer(step.inputs[name], dtype=of).view(ROWS, -1) for name, of in dtypes.items())
            logits = logits[:, : manifest.tokens.vocab_size]
            expected = sample_on_host(logits, params, keys, step.processed, manifest.sampling.global_topk)
            assert [token for (token,) in result.tokens] == expected.tolist()
            running = await group.begin(msgspec.structs.replace(step, processed=step.processed[:1], left=(2, 1)))
            # Later, the ranks may already have picked.
            if position % 2:
                assert (await running).tokens == [result.tokens[0], [], []]
            later = await (await group.pick(step.processed[1:]))
            assert later.tokens == [result.tokens[0], [], result.tokens[2]]
        first, second = ask(NUM_STEPS), ask(NUM_STEPS + 1)
        tokens = [token for (token,) in (await group.run(first)).tokens]
        told = msgspec.structs.replace(second, inputs={**second.inputs, "input_ids": array("i", tokens)})
        expected_result = await group.run(told)
        await group.run(first)
        result = await group.run(msgspec.structs.replace(second, depends_on_previous=True))
        assert result.tokens == expected_result.tokens
        assert bytes(result.internal["rank_logits"]) == bytes(expected_result.internal["rank_logits"])
    finally:
        await group.close()


def test_ranks_pick_tokens_from_the_logits_that_executables_leave(forkservers: RankForkservers, tmp_path: Path) -> None:
    bundle, *_ = make_plain(tmp_path, output_logits=False, returns_internal=True)
    asyncio.run(pick_in_ranks(bundle, forkservers))


@pytest.mark.parametrize("num_live", [ROWS, 2])
def test_ranks_pick_what_the_host_would(bundle: UnpublishedBundle, forkservers: RankForkservers, num_live: int) -> None:
    asyncio.run(run(bundle, forkservers, num_live))
