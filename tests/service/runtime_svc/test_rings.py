"""Sequences that wrap around the rings of a model with a window, through the runtime, against transformers."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bundle.store.layout import Layout
from bundle.store.oci import WEIGHTS_TYPE
from bundle.store.writer import BundleWriter
from compiler_svc.weights.checkpoint import Checkpoint
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from targets.cpu import EXPORTED_PROGRAM
from tests.bundles.manifests import DYNAMIC
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.tiny_models import TinyModel
from tests.parity.reference import Reference, assert_same_tokens, draw_prompt, write_checkpoint
from tests.servers.runtime import serve_runtime, tokens_of

BUCKET, LENGTH = 16, 128


def make_sliding_bundle(directory: Path) -> tuple[UnpublishedBundle, Reference]:
    """Windows of 24 positions, and rings of 48; it picks tokens itself, so its steps are called ahead."""
    reference = write_checkpoint(directory / "model", "mistral-window")
    tiny = TinyModel(reference.model, Checkpoint.open(reference.path))
    spec = tiny.spec(
        num_slots=4,
        sampling=msgspec.structs.replace(DYNAMIC, global_topk=0),
        reads_context=True,
        skips_idle=True,
        largest_step=BUCKET,
    )
    buckets = {"context_buckets": (8, BUCKET), "token_buckets": (LENGTH,)}
    return make_bundle(directory, spec, tiny.plan(), tiny.checkpoint, **buckets), reference


def publish(store: Layout, bundle: UnpublishedBundle) -> str:
    """Puts a bundle into a store; returns its digest."""
    writer = BundleWriter(store)
    for executable in bundle.manifest.executables:
        path = bundle.blob_path(executable.blob)
        writer.add_blob(path, EXPORTED_PROGRAM.media_type, f"executables/{executable.tag}")
    for shard in bundle.manifest.shards():
        assert shard.blob is not None
        writer.add_blob(bundle.blob_path(shard.blob), WEIGHTS_TYPE, "weights/tp0_sharded_checkpoint.safetensors")
    return writer.publish(bundle.manifest)


@pytest.mark.slow
async def test_sequences_that_come_and_go_wrap_around_their_rings(tmp_path: Path) -> None:
    """Ten over four slots and three rows; prompts come in chunks while others run; two leave early."""
    bundle, reference = make_sliding_bundle(tmp_path)
    assert {(tensor.window, tensor.num_positions) for tensor in bundle.manifest.state.tensors} == {(24, 48)}
    with RankForkservers() as forkservers:
        start_ranks = partial(RankGroup.start, open_forkserver=forkservers.open)
        async with serve_runtime(tmp_path / "runtime", "--max-chunk-tokens=8", start_ranks=start_ranks) as served:
            await served.load(publish(served.store, bundle))
            state_bytes = sum(4 * 5 * 2 * 48 * 8 for _ in bundle.manifest.state.tensors)
            assert (await served.get()).kv_bytes == state_bytes

            async def check(number: int) -> None:
                prompt = draw_prompt(3 + number % 14, seed=number)
                count = 20 if number in (2, 5) else LENGTH - len(prompt)
                tokens = tokens_of(await served.generate(prompt, count, temperature=0.0))
                assert len(tokens) == count
                assert_same_tokens(tokens, reference.greedy(prompt, count))

            await asyncio.gather(*map(check, range(10)))
            (deployment,) = served.server.deployments.list()
            assert deployment.engine is not None
            steps = deployment.engine.scheduler.statistics.steps
            assert steps["context_encoding", (8,)] > 10, "no prompt came in chunks"
