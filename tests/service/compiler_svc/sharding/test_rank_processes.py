"""Ranks as they are served: in processes of their own, picking tokens together without exchanging their logits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch

from bundle.abi.outputs import IDLE_TOKEN
from bundle.digest import sha256_file
from compiler_svc.builds.executable_stage import find_live_inputs
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import describe_submodel
from execution.forkserver.client import ForkserverClient
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from execution.step import Step
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.tiny_models import TinyModel, draw_tokens, write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.ranks.noise import draw_keys
from tests.ranks.step_values import make_inputs
from tests.ranks.stepping import Stepper
from tests.ranks.threads import run_ranks
from tests.service.compiler_svc.lower.libraries import lower
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

DEGREE: Final = 2
BUCKET: Final = 16
#: Three rows: drawn from the whole vocabulary's nucleus, from a few, and the likeliest.
PARAMS: Final = ((0.0, 0.9, 1.4), (5.0, 0.95, 1.2), (0.0, 1.0, 0.0))
SEQUENCES: Final = tuple(draw_tokens(6, seed=row) for row in range(3))
KEYS: Final = tuple(draw_keys(3, position=position) for position in range(6))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    attributes = GEOMETRIES["padded-gqa2-yarn"] | {"num_hidden_layers": 1}
    return write_tiny_model(tmp_path_factory.mktemp("model"), attributes)


@pytest.fixture(scope="module")
def spec(tiny: TinyModel) -> GraphSpec:
    return tiny.spec(tp_degree=DEGREE, sampling=make_sampling(dynamic=True), output_logits=False, skips_idle=True)


@pytest.fixture(scope="module")
def expected(tiny: TinyModel, spec: GraphSpec) -> list[list[int]]:
    """Tokens of each step, from the modules themselves."""
    plan = tiny.plan(tp_degree=DEGREE)

    def run(rank: int) -> list[list[int]]:
        stepper = Stepper(spec, plan, tiny.checkpoint, context_buckets=(BUCKET,), token_buckets=(BUCKET,), rank=rank)
        params = torch.tensor(PARAMS)
        steps = [
            stepper.decode(
                {row: (SEQUENCES[row][position], position) for row in range(3)},
                sampling_params=params,
                noise_keys=keys,
            )
            for position, keys in enumerate(KEYS)
        ]
        return [step["tokens"].tolist() for step in steps]

    first, *others = run_ranks(DEGREE, run)
    assert all(other == first for other in others)
    return first


@pytest.fixture
def compiled_bundle(
    bundle: UnpublishedBundle,
    tiny: TinyModel,
    spec: GraphSpec,
    tmp_path: Path,
    lowerings: ForkserverClient,
) -> UnpublishedBundle:
    """The bundle with its decode step compiled, and nothing else."""
    (decode,) = bundle.manifest.executables_of("token_generation")
    submodel = describe_submodel(spec, "token_generation", BUCKET)
    program = export_submodel(spec, tiny.plan(tp_degree=DEGREE), submodel).program
    lowered = lower(
        lowerings, tmp_path / "lowered", program, num_state=len(decode.state), live=find_live_inputs(submodel)
    )
    digest = sha256_file(lowered.path)
    compiled = msgspec.structs.replace(
        decode,
        format=lowered.format,
        state_convention=lowered.state_convention,
        blob=digest,
        constants=tuple(one for one in decode.constants if one.name in lowered.constants),
    )
    manifest = msgspec.structs.replace(bundle.manifest, executables=(compiled,), optimization_level=1)
    return UnpublishedBundle(manifest, {**bundle.blobs, digest: lowered.path})


async def serve(bundle: UnpublishedBundle, forkservers: RankForkservers, num_live: int = 3) -> list[list[int]]:
    """Tokens of each step, from processes; rows that are not live have inputs that count in vain."""
    (decode,) = bundle.manifest.executables_of("token_generation")
    group = await RankGroup.start(bundle.manifest, bundle.blob_path, num_threads=1, open_forkserver=forkservers.open)
    try:
        await group.load()
        tokens = []
        for position, keys in enumerate(KEYS):
            inputs: dict[str, list[float]] = {
                "input_ids": [sequence[position] for sequence in SEQUENCES],
                "position_ids": [position] * 3,
                "seq_ids": [0, 1, 2],
                "live_rows": [num_live],
                "sampling_params": [value for row in PARAMS for value in row],
                "noise_keys": keys.flatten().tolist(),
            }
            result = await group.run(Step(decode.tag, make_inputs(inputs)))
            tokens.append([token for (token,) in result.tokens])
        return tokens
    finally:
        await group.close()


@pytest.fixture
def bundle(tiny: TinyModel, spec: GraphSpec, tmp_path: Path) -> UnpublishedBundle:
    plan = tiny.plan(tp_degree=DEGREE)
    return make_bundle(tmp_path, spec, plan, tiny.checkpoint, context_buckets=(BUCKET,), token_buckets=(BUCKET,))


def test_processes_pick_what_the_modules_pick(
    bundle: UnpublishedBundle, forkservers: RankForkservers, expected: list[list[int]]
) -> None:
    assert asyncio.run(serve(bundle, forkservers)) == expected


@pytest.mark.slow
@pytest.mark.toolchain
def test_compiled_ranks_pick_what_the_modules_pick(
    compiled_bundle: UnpublishedBundle, forkservers: RankForkservers, expected: list[list[int]]
) -> None:
    assert asyncio.run(serve(compiled_bundle, forkservers)) == expected
    of_two = asyncio.run(serve(compiled_bundle, forkservers, num_live=2))
    assert of_two == [[*step[:2], IDLE_TOKEN] for step in expected], "ranks exchange live rows alone"
